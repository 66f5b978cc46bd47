"""The kind of error that whoever starts a service is meant to read."""


class StartError(Exception):
    """The service cannot start; the message is one sentence."""
