"""Checks of a request before it is sent to the engine: prompts, sampling parameters, resumptions and so on."""
