"""The error of a service's start, for its operator."""


class StartError(Exception):
    """The service cannot start. The message is one sentence."""
