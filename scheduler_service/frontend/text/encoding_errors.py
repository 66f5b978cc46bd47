"""Why a text or a chat has no token ids: exceptions, and the first bytes of template_renderer.py's answers."""

TEXT, REFUSED, TOO_MANY = b"t", b"r", b"m"
"""The first byte of an answer: a text follows, a reason, or nothing."""


class TooManyTokensError(ValueError):
    """A text has more tokens than the limit."""


class TemplateError(ValueError):
    """The chat template refused the messages."""
