"""Checks of a request before it is sent to the engine."""
