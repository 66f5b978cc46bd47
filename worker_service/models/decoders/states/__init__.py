"""Layers of the native decoder that keep states in place of keys and values."""
