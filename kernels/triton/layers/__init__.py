"""Triton kernels for norms, rotary embeddings and activations."""
