"""Sampling of tokens from logits, in eager torch. These functions are the oracle with which tests compare the faster
kernels. The module `ops` chooses the kernels for a device."""
