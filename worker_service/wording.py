"""Words from untrusted files and from libraries, made fit for a sentence: short, and on one line."""

from pagewire_common.model_files.shown import shown as shown

_MAX_NAME = 200
_MAX_REASON = 1_000


def named(name: str) -> str:
    """A tensor's or a key's name, or its `shown` form if it is long or would break the line."""
    return name if name.isprintable() and 0 < len(name) <= _MAX_NAME else shown(name)


def reason(error: Exception) -> str:
    """A library's reason for an error, without its advice to trust a model's code: there is no such setting here."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs code of its own, and a model's code is never run"
    return text[:_MAX_REASON]
