"""Checks which options of `Ops.paged_attention` may be combined. Every backend calls this function first, so kernels
contain no checks."""

import torch
from torch import Tensor


def check_attention_options(
    query: Tensor, window: int | None, soft_cap: float | None, bias: Tensor | None, causal: bool
) -> None:
    """Raise ValueError for a forbidden combination, or for an argument of a wrong shape or type.

    The combination of a soft cap and a bias is forbidden. No network uses both a soft cap and a bias, so the order of
    the two options is undefined.
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
