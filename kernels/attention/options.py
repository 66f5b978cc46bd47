"""Checks whether the options of `Ops.paged_attention` may be combined. Every backend calls `check_attention_options`
before its kernel, so kernels contain no checks."""

import torch
from torch import Tensor


def check_attention_options(
    query: Tensor, window: int | None, soft_cap: float | None, bias: Tensor | None, causal: bool
) -> None:
    """Raise ValueError if options of paged attention are combined that must not be, or if the bias has a wrong shape or
    type.

    A soft cap and a bias must not be combined: no network uses both, so it is not defined which of them applies first.
    """
    if not causal and (window is not None or bias is not None):
        raise ValueError("attention that is not causal knows no distances: it goes with neither a window nor a bias")
    if bias is None:
        return
    if soft_cap is not None:
        raise ValueError("attention has either a bias or a soft cap, not both")
    fits = bias.ndim == 2 and bias.shape[0] == query.shape[1] and bias.shape[1] > 0
    if not (fits and bias.dtype is torch.float32 and bias.is_contiguous() and bias.device == query.device):
        raise ValueError(
            f"the bias is {tuple(bias.shape)} of {bias.dtype} on {bias.device}; it must be contiguous float32 of "
            f"({query.shape[1]} heads, at least one distance) on {query.device}"
        )
