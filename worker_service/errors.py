"""What can go wrong with a step, or with a file before there are any."""


class InvalidStepError(ValueError):
    """A SchedulerOutput contradicts the worker's limits or the session; the message is one sentence."""


class FencingError(ValueError):
    """A step out of turn: a gap in step_id, or an epoch that is not the session's; the message is one sentence."""


class DeviceLostError(Exception):
    """The device takes no more work in this process; only another process can go on with it."""


class UnsoundFileError(ValueError):
    """A file contradicts itself; the message is the second half of a sentence that begins with its name."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out on the host or the device; torch raises a plain RuntimeError for the host's."""
    wording = ("out of memory", "allocate memory", "enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in wording)
    )
