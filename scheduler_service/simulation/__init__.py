"""Capacity planning without a GPU: the real scheduler core, workers made of arithmetic, and a clock that only jumps."""
