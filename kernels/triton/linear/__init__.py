"""Triton kernels for products by weights of linear layers, experts and adapters."""
