"""Sampling of tokens from logits, in eager torch. Tests compare faster kernels with these functions; `ops` chooses the
kernels."""
