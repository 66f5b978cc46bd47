"""Errors of encoding a text or a chat: exceptions, and the first byte of each answer of a rendering process."""

TEXT, REFUSED, TOO_MANY = b"t", b"r", b"m"
"""The first byte of a rendering process's answer. `TEXT` precedes the rendered text, `REFUSED` the reason."""


class TooManyTokensError(ValueError):
    """A text or a chat has more tokens than its limit."""


class TemplateError(ValueError):
    """The chat template refused the messages."""
