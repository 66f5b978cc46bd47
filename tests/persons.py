"""Words for persons, also within names in snake case. Requests, sequences and workers are none."""

import re

_WORDS = "who|whom|whoever|nobody|nobodys|somebody|everybody|anybody|no one|someone|everyone|anyone"
_PATTERN = re.compile(rf"(?<![a-z])({_WORDS})(?![a-z])", re.IGNORECASE)


def persons_in(text: str) -> list[str]:
    """The words for persons in a text."""
    return _PATTERN.findall(text.replace("_", " "))
