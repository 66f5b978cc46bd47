"""The kind of error that is meant for the operator who starts a service."""


class StartError(Exception):
    """The service cannot start; the message is one sentence."""
