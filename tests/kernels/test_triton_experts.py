"""The kernels of a mixture of experts against eager torch."""

from importlib import import_module

import pytest
import torch
from test_float8 import random_weight
from triton_helpers import DEVICE, DTYPES, INTERPRETED, quiet_interpreter, randn, strict

from kernels import reference, triton
from kernels.float8 import FLOAT8_CAPABILITY, Float8Weight, round_rows
from kernels.linear.experts import group_rows
from kernels.triton import invariant

ops = strict(triton)

COUNTS = [
    [1],
    [0, 0, 1, 0],
    [0, 17, 1, 0, 4],
    [0, 0, 33],
    [16, 32, 0, 15, 1, 0],
    [1] * 9,
    [0] * 40 + [5] + [0] * 87,
    [16, 70],
    [250, 7],
]
"""Rows of each expert: none, one, whole blocks, all with one, more experts than rows; few, some and many on average."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (70, 129), (64, 64)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_are_multiplied_with_their_experts_weights(
    counts: list[int], outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weights = randn(sum(counts), inputs, dtype=dtype), randn(len(counts), outputs, inputs, dtype=dtype, seed=1)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0)
    for wide in {False, dtype is not torch.float32}:
        found = ops.grouped_linear(x, weights, ends, wide)
        expected = reference.grouped_linear(x.float(), weights.float(), ends).to(found.dtype)
        assert found.dtype is (torch.float32 if wide else dtype)
        tolerance = 1e-4 if found.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs", "groups"), [(1, 123, 1), (70, 48, 3), (130, 256, 2)])
@pytest.mark.parametrize("counts", [[1], [0, 17, 1, 0, 4], [129, 0, 3], [40], [129]], ids=str)
def test_rows_are_multiplied_with_their_experts_weights_in_8_bits(
    counts: list[int], outputs: int, inputs: int, groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip("this GPU has no e4m3")
    if INTERPRETED:  # where rows are rounded towards zero
        monkeypatch.setattr(import_module("kernels.triton.linear.grouped_float8"), "round_rows", round_rows)
    weights = [random_weight(outputs, inputs, seed, groups=groups) for seed in range(len(counts))]
    numbers, scales = (torch.stack([weight[part] for weight in weights]).to(DEVICE) for part in (0, 1))
    x, ends = randn(sum(counts), inputs, dtype=dtype), torch.tensor(counts, device=DEVICE).cumsum(0)
    for wide in {False, dtype is not torch.float32}:
        found = ops.grouped_float8(x, Float8Weight(numbers, scales), ends, wide)
        expected = reference.grouped_float8(x, Float8Weight(numbers, scales), ends, wide)
        assert found.dtype is (torch.float32 if wide else dtype)
        tolerance = 1e-4 if found.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_summed_up_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    ops, x, weights = strict(invariant), randn(40, 129, dtype=dtype), randn(3, 70, 129, dtype=dtype, seed=1)
    together = ops.grouped_linear(x, weights, torch.tensor([0, 21, 40], device=DEVICE))
    for row in (0, 5, 20):
        alone = x[row : row + 1]
        found = ops.grouped_linear(alone, weights, torch.tensor([0, 1, 1], device=DEVICE))
        assert torch.equal(found[0], together[row])


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (5, 2), (128, 8), (6, 6), (512, 10)])
def test_the_experts_with_the_largest_logits_are_chosen(num_experts: int, num_chosen: int, renormalise: bool) -> None:
    logits = 4 * randn(41, num_experts)
    logits[1] = logits[1].round()  # with equal values, and zeros of both signs
    logits[2, 1::2] = -torch.inf
    weights, experts = ops.choose_experts(logits, num_chosen, renormalise)
    expected = reference.choose_experts(logits, num_chosen, renormalise)
    assert torch.equal(experts, expected[1])
    torch.testing.assert_close(weights, expected[0])
    alone = ops.choose_experts(logits[7:8], num_chosen, renormalise)
    assert torch.equal(alone[0], weights[7:8])


@quiet_interpreter
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_experts_are_distinct_whatever_the_logits(value: float) -> None:
    logits = randn(3, 20)
    logits[0], logits[1, 5:9] = value, value
    weights, experts = ops.choose_experts(logits, 8, True)
    assert [len(set(chosen)) for chosen in experts.tolist()] == [8] * 3
    assert experts.min() >= 0
    assert experts.max() < 20
    assert torch.equal(experts[2], reference.choose_experts(logits[2:], 8, True)[1][0])
    assert weights[2].sum().isclose(torch.ones((), device=DEVICE))


@pytest.mark.parametrize(("num_tokens", "num_chosen", "num_experts"), [(1, 8, 128), (0, 2, 3), (41, 2, 5), (700, 3, 4)])
def test_rows_are_grouped_by_expert(num_tokens: int, num_chosen: int, num_experts: int) -> None:
    experts = randn(num_tokens, num_experts).argsort(1)[:, :num_chosen]
    found, expected = ops.group_rows(experts, num_experts), group_rows(experts, num_experts)
    for part, other in zip(found, expected, strict=True):
        assert torch.equal(part, other)


def test_no_rows_are_no_work() -> None:
    ends = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    assert ops.grouped_linear(randn(0, 8), randn(3, 5, 8), ends).shape == (0, 5)
    places = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert ops.combine_rows(randn(0, 5), places, randn(0, 2)).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chosen", "size"), [(1, 8), (3, 123), (8, 1025)])
def test_rows_are_combined_by_weight(chosen: int, size: int, dtype: torch.dtype) -> None:
    rows, weights = randn(6 * chosen, size, dtype=dtype), randn(6, 2 * chosen, seed=1).abs()[:, ::2]
    places = torch.randperm(6 * chosen, generator=torch.Generator().manual_seed(2)).view(6, chosen).to(DEVICE)
    found = ops.combine_rows(rows, places, weights)
    torch.testing.assert_close(found, reference.combine_rows(rows, places, weights))
    for token in range(6):
        alone = ops.combine_rows(rows, places[token : token + 1], weights[token : token + 1])
        assert torch.equal(alone[0], found[token])
