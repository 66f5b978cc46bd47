"""Quantises weight matrices to 8 and 4 bits."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import GroupedWeight

WEIGHT_GROUP = 32
"""Neighbouring weights of an output that share a scale in int8 and int4."""


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [outputs, inputs]. Returns [outputs, inputs] int8 within ±127, and scales [outputs, groups] bf16. A group
    has 32 inputs; the last may have fewer."""
    numbers, scales = [], []
    # 4,096 rows at a time: a large output head in float32 would determine the peak memory of a worker's start.
    for rows in torch.split(weight, 4096):
        groups = _groups(rows)
        largest = groups.abs().amax(dim=2).clamp_(min=127 * torch.finfo(torch.bfloat16).tiny)
        scales.append((largest / 127).bfloat16())
        rounded = (groups / scales[-1].float()[:, :, None]).round_().clamp_(-127, 127).to(torch.int8)
        numbers.append(rounded.flatten(1)[:, : rows.shape[1]])
    return torch.cat(numbers), torch.cat(scales)


W8A8_GROUP = 64
"""Neighbouring inputs of an output that share a scale in w8a8, where weights and x have 8 bits."""


def quantize_w8a8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to int8 for w8a8. Raises ValueError if the weight is not finite. weight: [outputs, inputs]. Returns
    [outputs, inputs] int8 within ±127, and scales [outputs, groups] float32. A group has 64 inputs; the last may have
    fewer."""
    numbers, scales = [], []
    for rows in torch.split(weight, 4096):  # limits memory, see `quantize_int8`
        groups = _groups(rows, W8A8_GROUP)
        largest = groups.abs().amax(dim=2)
        if not largest.isfinite().all():
            raise ValueError("a weight is not finite")
        scales.append(largest.clamp_(min=1e-30) / 127)
        rounded = (groups / scales[-1][:, :, None]).round_().clamp_(-127, 127).to(torch.int8)
        numbers.append(rounded.flatten(1)[:, : rows.shape[1]])
    return torch.cat(numbers).contiguous(), torch.cat(scales)


def quantize_int4(weight: Tensor) -> GroupedWeight:
    """Quantise [outputs, inputs] to 4 bits, with scale and minimum for groups of 32 inputs, as GGUF's Q4_1. Of several
    ranges of values, each group uses the one with the least squared error: narrower ranges clip the largest weights,
    but have smaller scales. Raises ValueError if a scale exceeds float16."""
    numbers, scales, minimums = [], [], []
    # As many rows as stay in a core's cache; with 1,000 rows, twelve times as long.
    for rows in torch.split(weight, max(1, 2**18 // weight.shape[1])):
        groups = _groups(rows)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        least = torch.full_like(low, torch.inf)
        scale, minimum, chosen = torch.zeros_like(low), torch.zeros_like(low), torch.zeros_like(groups)
        for share in _INT4_SHARES:
            step = (high - low) * (share / 15)
            start = (high + low - 15 * step) / 2
            tried = ((groups - start) / step).round_().clamp_(0, 15).nan_to_num_(0.0)
            fitted_scale, fitted_minimum = _fit(tried, groups)
            tried = ((groups + fitted_minimum) / fitted_scale).round_().clamp_(0, 15).nan_to_num_(0.0)
            error = (tried * fitted_scale - fitted_minimum - groups).square_().sum(2, keepdim=True)
            is_less = error < least
            least = torch.where(is_less, error, least)
            scale, minimum = torch.where(is_less, fitted_scale, scale), torch.where(is_less, fitted_minimum, minimum)
            chosen = torch.where(is_less, tried, chosen)
        if not least.isfinite().all():
            raise ValueError("a weight is not finite, or too large for int4")
        numbers.append(chosen.to(torch.uint8).flatten(1)[:, : rows.shape[1]])
        scales.append(scale.squeeze(2).half())
        minimums.append(minimum.squeeze(2).half())
    return GroupedWeight(torch.cat(numbers), torch.cat(scales), torch.cat(minimums), 4)


_INT4_SHARES = (1.0, 0.94, 0.88, 0.82)
"""Ranges to try, as fractions of a group's range."""


def _fit(numbers: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum in float16 with the least squared error."""
    mean, mean_of_weights = numbers.mean(2, keepdim=True), groups.mean(2, keepdim=True)
    deviation = numbers - mean
    spread = deviation.square().sum(2, keepdim=True)
    scale = (deviation * groups).sum(2, keepdim=True) / spread.clamp_(min=1e-20)
    return scale.half().float(), (scale * mean - mean_of_weights).half().float()


def _groups(rows: Tensor, size: int = WEIGHT_GROUP) -> Tensor:
    """[rows, groups, inputs of a group] float32. The last group is padded with copies of the last weight."""
    padding = (0, -rows.shape[1] % size)
    return functional.pad(rows.float(), padding, mode="replicate").view(len(rows), -1, size)
