"""The exceptions of a worker: errors of a step, and errors of files that are read before the first step."""


class InvalidStepError(ValueError):
    """A step contradicts the worker's limits or the session's state. The text of the exception is one sentence."""


class FencingError(ValueError):
    """A step is out of order: its step_id is not the next one, or its epoch is not the session's epoch. The text of the
    exception is one sentence.
    """


class DeviceLostError(Exception):
    """This process can no longer use the GPU. Only a new process can use the GPU again."""


class UnsoundFileError(ValueError):
    """The contents of a file contradict each other. The text of the exception continues a sentence that begins with the
    file's name.
    """


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory has run out on the host or on the device. If host memory runs out, torch
    raises a plain RuntimeError.
    """
    wording = ("out of memory", "allocate memory", "enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in wording)
    )
