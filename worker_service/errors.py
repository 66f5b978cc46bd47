"""The exceptions of a worker."""


class InvalidStepError(ValueError):
    """A step contradicts the worker's limits or the session's state. The text is one sentence."""


class FencingError(ValueError):
    """A step_id is not the next, or an epoch is not the session's. The text is one sentence."""


class DeviceLostError(Exception):
    """This process can no longer use the GPU, but a new process can."""


class UnsoundFileError(ValueError):
    """The contents of a file contradict each other. The text continues a sentence that begins with the file's name."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether host or device memory has run out. For host memory, torch raises a plain RuntimeError."""
    wording = ("out of memory", "allocate memory", "enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in wording)
    )
