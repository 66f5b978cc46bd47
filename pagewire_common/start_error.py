"""The error of a service's start, for its operator."""


class StartError(Exception):
    """The service cannot start. The error's message is one sentence."""
