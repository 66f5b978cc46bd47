"""The kind of error that is meant for the operator of a service."""


class StartError(Exception):
    """The service cannot start; the message is one sentence."""
