"""The calls of a client: one file for each kind of call."""
