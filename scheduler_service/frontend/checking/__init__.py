"""Checks of a request before it reaches the engine: prompts, sampling parameters, resumptions, encoder inputs."""
