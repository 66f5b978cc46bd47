"""Why a text or a chat has no token ids: as errors, and as what template_renderer.py answers."""

TEXT, REFUSED, TOO_MANY = b"t", b"r", b"m"
"""The first byte of its answer; a text follows, a reason, or nothing."""


class TooManyTokensError(ValueError):
    """A text has more tokens than the limit."""


class TemplateError(ValueError):
    """The chat template refused the messages."""
