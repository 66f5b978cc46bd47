"""The reasons why a worker, or an adapter on a worker, cannot be used."""


class WorkerError(Exception):
    """The worker cannot be used. The text is the reason."""

    blames_requests = True
    """Whether a request in flight may have crashed the worker."""


class UnreachableError(WorkerError):
    """No worker answers at the address, or the worker is not ready."""


class DrainedError(WorkerError):
    """The worker shuts down or was drained."""

    blames_requests = False


class AdapterRefusedError(WorkerError):
    """The worker cannot use an adapter."""

    blames_requests = False


class AdapterFailedError(WorkerError):
    """An adapter could not be loaded; a later attempt may succeed."""

    blames_requests = False


class AdapterCountError(WorkerError):
    """The worker's adapters differ from the scheduler's record."""

    blames_requests = False


class FencedError(WorkerError):
    """The worker refused a step out of order, or has a session with a newer epoch."""

    blames_requests = False


class SupersededError(WorkerError):
    """Another scheduler has a session with the worker."""
