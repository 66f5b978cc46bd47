"""Sounds: what a model that hears reads of them, and what it has understood. How requests go is decided elsewhere."""
