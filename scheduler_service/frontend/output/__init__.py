"""Tokens from the engine, until they are messages of a client's stream."""
