"""Checks of a request before the engine sees it: prompts, sampling parameters, resumptions, inputs of encoders."""
