"""Sampling of tokens from logits, in eager torch, the oracle of the tests. `ops` chooses the kernels."""
