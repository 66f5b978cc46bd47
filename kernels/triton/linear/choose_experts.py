"""The experts with the largest logits for each token, and their weights; among equals, the lowest number first.

    `logits`   [tokens, experts] float32, contiguous.
    `weights`  [tokens, chosen] float32.
    `experts`  [tokens, chosen] int64.
    `program`  One token. Each logit and the number of its expert are one key of 64 bits: its upper half is the logit as
               an integer of the same order, NaN being largest as in torch's sort.

Oracle: `kernels.linear.experts.choose_experts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps


def choose_experts(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device=logits.device)
    if num_tokens:
        width = triton.next_power_of_2(num_experts)
        _choose_experts_kernel[(num_tokens,)](
            logits.contiguous(), weights, experts, num_experts, renormalise=renormalise, chosen=num_chosen,
            places=triton.next_power_of_2(num_chosen), width=width, num_warps=num_warps(width), **OPTIONS,
        )  # fmt: skip
    return weights, experts


@triton.jit
def _choose_experts_kernel(
    logits, weights, experts, num_experts,
    renormalise: tl.constexpr, chosen: tl.constexpr, places: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, width)
    is_expert = number < num_experts
    values = tl.load(logits + token * num_experts + number, mask=is_expert, other=float("-inf"))
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # zero has two signs
    ranks = tl.where(values != values, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    least = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(is_expert, (ranks.to(tl.int64) << 32) | (width - 1 - number), least)
    place = tl.arange(0, places)
    found = tl.full([places], least, tl.int64)
    for turn in range(chosen):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, least, keys)
        found = tl.where(place == turn, best, found)
    ranks_found = (found >> 32).to(tl.int32)
    logits_found = tl.where(ranks_found < 0, ranks_found ^ 0x7FFFFFFF, ranks_found).to(tl.float32, bitcast=True)
    largest = tl.sum(tl.where(place == 0, logits_found, 0.0), axis=0)
    shares = tl.where(place < chosen, tl.exp(logits_found - largest), 0.0)
    whole = tl.sum(shares, axis=0) if renormalise else tl.sum(tl.exp(values - largest), axis=0)
    at = token * chosen + place
    tl.store(weights + at, shares / whole, mask=place < chosen)
    tl.store(experts + at, width - 1 - (found & 0xFFFFFFFF), mask=place < chosen)
