"""Errors of encoding a text or a chat: exceptions, and the first byte of each answer of a rendering process."""

TEXT, MARKED, REFUSED, TOO_MANY = b"t", b"k", b"r", b"m"
"""The first byte of a rendering process's answer. The rendered text follows `TEXT`. The first and the last character of
each mark, and then the rendered text, follow `MARKED`. The reason of a refusal follows `REFUSED`, and no data follows
`TOO_MANY`.
"""


class TooManyTokensError(ValueError):
    """A text or a chat has more tokens than its limit."""


class TemplateError(ValueError):
    """The chat template refused the messages."""
