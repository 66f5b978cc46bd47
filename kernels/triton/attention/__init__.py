"""Triton kernels for attention over the blocks of a KV cache, and kernels that write and copy blocks."""
