"""Attention over the blocks of a KV cache, and what writes and moves them."""
