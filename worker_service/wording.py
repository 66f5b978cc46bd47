"""Makes words of untrusted files and of libraries fit for an error message: short, and on one line."""

from pagewire_common.model_files.shown import shown as shown

_MAX_NAME = 200
_MAX_REASON = 1_000


def named(name: str) -> str:
    """The name of a tensor or key. A name that is long or cannot be printed on one line is returned in its `shown`
    form.
    """
    return name if name.isprintable() and 0 < len(name) <= _MAX_NAME else shown(name)


def reason(error: Exception) -> str:
    """A library's reason for an error, without its advice to trust the model's code, because the worker has no setting
    for trust.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs code of its own, and a model's code is never run"
    return text[:_MAX_REASON]
