"""The errors of a service's start, for its operator."""


class StartError(Exception):
    """The service cannot start; the message is one sentence."""
