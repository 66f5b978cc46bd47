"""Shortens names in untrusted files and error texts of libraries to one short line, for error messages."""

from pagewire_common.model_files.shown import shown as shown

_MAX_NAME = 200
_MAX_REASON = 1_000


def named(name: str) -> str:
    """The name of a tensor or key, escaped and shortened if long or not printable."""
    return name if name.isprintable() and 0 < len(name) <= _MAX_NAME else shown(name)


def reason(error: Exception) -> str:
    """The text of a library's error. Advice to set `trust_remote_code` is replaced, because a worker never runs a
    model's code."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs code of its own, and a model's code is never run"
    return text[:_MAX_REASON]
