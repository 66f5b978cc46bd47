"""Triton kernels for the operations of a decoder layer besides attention and products: norms, rotary embeddings and
activations."""
