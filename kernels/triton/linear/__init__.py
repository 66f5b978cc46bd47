"""Triton kernels for products by the weights of linear layers, experts and adapters."""
