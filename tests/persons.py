"""The words for persons, which requests, sequences and workers are not: names in snake case count as well."""

import re

_WORDS = "who|whom|whoever|nobody|nobodys|somebody|everybody|anybody|no one|someone|everyone|anyone"
_PATTERN = re.compile(rf"(?<![a-z])({_WORDS})(?![a-z])", re.IGNORECASE)


def persons_in(text: str) -> list[str]:
    """Such words in a text, as they stand there."""
    return _PATTERN.findall(text.replace("_", " "))
