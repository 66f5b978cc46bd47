"""Triton kernels for layers with states."""
