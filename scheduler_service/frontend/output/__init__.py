"""Converts tokens from the engine to messages of a client's stream."""
