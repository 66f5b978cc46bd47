"""The operations on states as Triton kernels against eager torch. Only a sequence's tokens change bits of its state."""

from collections.abc import Callable, Sequence
from importlib import import_module

import pytest
import torch
from state_cases import Operation, batch, bits, case, convolution, each_operation, pool_for, weights
from triton_helpers import DEVICE, DTYPES, strict

from kernels import reference, triton
from kernels.inputs import AttentionMetadata

ops = strict(triton)
LENS = [(1, 1), (1, 40), (3, 3), (4, 100), (0, 7)]
"""Query tokens and context of each sequence."""


@each_operation
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operation_is_the_references(make: Callable[..., Operation], dtype: torch.dtype) -> None:
    """All other blocks contain NaN: the operation reads and writes only blocks of sequences with query tokens."""
    operation = make(sum(n for n, _ in LENS), dtype, device=DEVICE)
    states, metadata = case(operation, LENS, DEVICE)
    expected_states, _ = case(operation, LENS, DEVICE)
    found = operation.call(ops, operation.by_token, states, metadata)
    expected = operation.call(reference, operation.by_token, expected_states, metadata)
    assert expected.isfinite().all()
    tolerance = 2e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5, equal_nan=True)


@each_operation
def test_neither_chunks_nor_neighbours_change_a_bit(make: Callable[..., Operation]) -> None:
    compare_chunks(make, (1, 3, 1))


def test_neither_do_chunks_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("kernels.triton.states.short_convolution"), "_PROGRAMS", 2)
    compare_chunks(convolution, (1, 34, 2))


def compare_chunks(make: Callable[..., Operation], sizes: Sequence[int]) -> None:
    num_tokens = sum(sizes)
    operation = make(num_tokens, torch.float16, device=DEVICE)
    states = pool_for(operation, 9, DEVICE)
    whole = operation.call(ops, operation.by_token, states, batch([(num_tokens,) * 2], [4], DEVICE))
    done, parts = 0, []
    for size in sizes:
        rows = slice(done, done + size)
        done += size
        # A sequence of as many tokens comes before it, and one of one token after it.
        both = [torch.cat((part[-size:], part[rows], part[:1])) for part in operation.by_token]
        lens = [(size, size), (size, done), (1, 1)]
        parts.append(operation.call(ops, both, states, batch(lens, [8, 2, 0], DEVICE))[size:-1])
    assert torch.equal(bits(torch.cat(parts)), bits(whole))
    assert torch.equal(bits(states[2]), bits(states[4]))


@each_operation
def test_padding_rows_change_no_state(make: Callable[..., Operation]) -> None:
    """A CUDA graph's rows without context, whose block tables have any block."""
    operation = make(3, torch.float32, device=DEVICE)
    states = pool_for(operation, 4, DEVICE)
    states[2] = weights(*operation.state, device=DEVICE)
    before = states.clone()
    alone = operation.call(ops, [part[:1] for part in operation.by_token], before, batch([(1, 9)], [2], DEVICE))
    tables = torch.tensor([[2, 7], [2, 7], [3, 7]], dtype=torch.int32, device=DEVICE)
    lens = batch([(1, 9), (1, 0), (1, 0)], [2, 2, 3], DEVICE)
    padded = AttentionMetadata(lens.query_start, lens.context_lens, tables, 1, 9)
    found = operation.call(ops, operation.by_token, states, padded)
    assert torch.equal(found[:1], alone)
    assert torch.equal(bits(states), bits(before))
    assert found.isfinite().all()


@each_operation
def test_a_step_without_sequences_is_nothing(make: Callable[..., Operation]) -> None:
    operation = make(0, torch.float16, device=DEVICE)
    found = operation.call(ops, operation.by_token, pool_for(operation, 1, DEVICE), batch([], [], DEVICE))
    assert found.shape[0] == 0


def test_a_convolution_with_another_activation_is_refused() -> None:
    x = torch.zeros(0, 2, device=DEVICE)
    with pytest.raises(ValueError, match="silu or none, not gelu"):
        ops.short_convolution(x, x.T, None, x[None], batch([], [], DEVICE), "gelu")
