"""Decides which blocks store the keys and values of each sequence. `planning` decides when a sequence receives
blocks."""
