"""Errors of encoding a text or a chat: exceptions, and the first bytes of template_renderer.py's answers."""

TEXT, REFUSED, TOO_MANY = b"t", b"r", b"m"
"""The first byte of an answer. After `TEXT` the rendered text follows, after `REFUSED` a reason, after `TOO_MANY`
nothing.
"""


class TooManyTokensError(ValueError):
    """A text has more tokens than the limit."""


class TemplateError(ValueError):
    """The chat template refused the messages."""
