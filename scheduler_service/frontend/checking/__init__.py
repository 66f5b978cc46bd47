"""Checks of a request before the engine receives the request: prompts, sampling parameters, resumptions and so on."""
