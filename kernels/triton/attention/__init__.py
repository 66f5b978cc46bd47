"""Triton kernels for attention over blocks of a KV cache, and for writing and copying blocks."""
