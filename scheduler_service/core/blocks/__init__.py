"""Blocks: where the keys and values of each sequence are stored."""
