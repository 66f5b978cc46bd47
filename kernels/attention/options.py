"""Checks the options of `Ops.paged_attention` for all backends, so that kernels need no checks."""

import torch
from torch import Tensor


def check_no_options(
    window: int | None,
    soft_cap: float | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    visible_ends: Tensor | None,
    *,
    causal: bool,
) -> None:
    if not causal or any(option is not None for option in (window, soft_cap, bias, sinks, visible_ends)):
        raise ValueError(
            "the Triton kernel of latent attention is causal, without a window, soft cap, bias, sinks and visible_ends"
        )


def check_attention_options(
    query: Tensor,
    window: int | None,
    soft_cap: float | None,
    bias: Tensor | None,
    causal: bool,
    sinks: Tensor | None = None,
    chunked: bool = False,
    visible_ends: Tensor | None = None,
) -> None:
    """Raise ValueError for options that exclude each other, or a bias or sinks of wrong shape or type. Soft cap and
    bias exclude each other: no network defines which applies first."""
    if visible_ends is not None and (bias is not None or chunked or not causal):
        raise ValueError("visible_ends exclude a bias, chunks, and attention that is not causal")
    if chunked and window is None:
        raise ValueError("chunked attention needs the size of a chunk (window)")
    if sinks is not None:
        fits = sinks.shape == query.shape[1:2] and sinks.dtype is torch.float32 and sinks.is_contiguous()
        if not (fits and sinks.device == query.device):
            raise ValueError(
                f"the sinks are {tuple(sinks.shape)} of {sinks.dtype} on {sinks.device}; they must be contiguous "
                f"float32 of ({query.shape[1]} heads) on {query.device}"
            )
    if not causal and (window is not None or bias is not None):
        raise ValueError("attention that is not causal supports neither a window nor a bias")
    if bias is None:
        return
    if soft_cap is not None:
        raise ValueError("attention supports a bias or a soft cap, not both")
    fits = bias.ndim == 2 and bias.shape[0] == query.shape[1] and bias.shape[1] > 0
    if not (fits and bias.dtype is torch.float32 and bias.is_contiguous() and bias.device == query.device):
        raise ValueError(
            f"the bias is {tuple(bias.shape)} of {bias.dtype} on {bias.device}; it must be contiguous float32 of "
            f"({query.shape[1]} heads, at least one distance) on {query.device}"
        )
