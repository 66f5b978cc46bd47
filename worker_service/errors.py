"""Errors of a step, and of files that are read before the first step."""


class InvalidStepError(ValueError):
    """A SchedulerOutput contradicts the worker's limits or the session. The error's message is one sentence."""


class FencingError(ValueError):
    """A step is out of order: a gap in step_id, or an epoch that is not the session's. The error's message is one
    sentence.
    """


class DeviceLostError(Exception):
    """The device accepts no more work from this process. Only a new process can use the device again."""


class UnsoundFileError(ValueError):
    """A file contradicts itself. The message continues a sentence that begins with the file's name."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out on the host or the device. For host memory torch raises a plain RuntimeError."""
    wording = ("out of memory", "allocate memory", "enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in wording)
    )
