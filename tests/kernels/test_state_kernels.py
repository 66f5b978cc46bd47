"""Operations on states: the compiled ones against the eager ones, both against transformers', and that nothing but a
sequence's tokens changes a bit of it."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from state_cases import (
    LENS,
    Operation,
    batch,
    bits,
    case,
    convolution,
    delta_rule,
    each_operation,
    pool_for,
    scan,
    weights,
)
from torch import Tensor

from kernels import reference

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@each_operation
@both_dtypes
def test_an_operation_is_the_references(
    kernels: ModuleType, make: Callable[..., Operation], dtype: torch.dtype
) -> None:
    operation = make(sum(n for n, _ in LENS), dtype)
    states, metadata = case(operation)
    expected_states, _ = case(operation)
    found = operation.call(kernels, operation.by_token, states, metadata)
    expected = operation.call(reference, operation.by_token, expected_states, metadata)
    assert expected.isfinite().all()
    tolerance = 2e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5, equal_nan=True)


@each_operation
@both_dtypes
def test_neither_chunks_nor_neighbours_nor_threads_change_a_bit(
    kernels: ModuleType, make: Callable[..., Operation], dtype: torch.dtype
) -> None:
    operation, threads = make(70, dtype), torch.get_num_threads()
    states = pool_for(operation, 9)
    whole = operation.call(kernels, operation.by_token, states, batch([(70, 70)], [4]))
    try:
        for sizes in ([1] * 70, [2, 1, 64, 3], [33, 37]):
            torch.set_num_threads(1 + 2 * len(sizes) % 4)
            done, parts = 0, []
            for size in sizes:
                rows = slice(done, done + size)
                done += size
                # Before it a sequence of as many tokens, and another one after it.
                both = [torch.cat((part[-size:], part[rows], part[:1])) for part in operation.by_token]
                lens = [(size, size), (size, done), (1, 1)]
                parts.append(operation.call(kernels, both, states, batch(lens, [8, 2, 0]))[size:-1])
            assert torch.equal(bits(torch.cat(parts)), bits(whole))
            assert torch.equal(bits(states[2]), bits(states[4]))
    finally:
        torch.set_num_threads(threads)


@each_operation
def test_a_step_without_sequences_is_nothing(kernels: ModuleType, make: Callable[..., Operation]) -> None:
    operation = make(0, torch.bfloat16)
    for ops in (kernels, reference):
        found = operation.call(ops, operation.by_token, pool_for(operation, 1), batch([], []))
        assert found.shape[0] == 0


@each_operation
def test_a_block_outside_the_pool_is_refused(kernels: ModuleType, make: Callable[..., Operation]) -> None:
    operation = make(1, torch.float32)
    for block in (-1, 9):
        with pytest.raises(RuntimeError, match=f"has its state in block {block} of 9"):
            operation.call(kernels, operation.by_token, pool_for(operation, 9), batch([(1, 2)], [block]))


def test_a_convolution_with_another_activation_is_refused(kernels: ModuleType) -> None:
    x = torch.zeros(0, 2)
    for ops in (kernels, reference):
        with pytest.raises(ValueError, match="silu or none, not gelu"):
            ops.short_convolution(x, torch.zeros(2, 3), None, torch.zeros(1, 2, 2), batch([], []), "gelu")


def continued(ops: ModuleType, operation: Operation) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of a prompt of all tokens but the last, and of the last; and the state after both."""
    states, num_tokens = pool_for(operation, 1), len(operation.by_token[0])
    prompt, last = ([part[rows] for part in operation.by_token] for rows in (slice(-1), slice(-1, None)))
    first = operation.call(ops, prompt, states, batch([(num_tokens - 1,) * 2], [0]))
    return first, operation.call(ops, last, states, batch([(1, num_tokens)], [0])), states[0]


def same(found: tuple[Tensor, Tensor, Tensor], *expected: Tensor) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.view(one.shape), atol=2e-5, rtol=2e-5)


TOKENS = 70


def test_convolutions_are_those_of_transformers(kernels: ModuleType) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    operation = convolution(TOKENS, torch.float32)
    weight, bias = weights(300, 4), weights(300)
    x = operation.by_token[0].T[None]
    state = x[..., -4:-1].clone()
    prompt = theirs.causal_conv1d_fn(x[..., :-1], weight, bias, activation="silu")
    last = theirs.causal_conv1d_update(x[..., -1:], state, weight, bias, "silu")
    for ops in (kernels, reference):
        same(continued(ops, operation), prompt[0].T.contiguous(), last[0].T.contiguous(), state)


@pytest.mark.parametrize("normalize", [True, False])
def test_delta_rules_are_those_of_transformers(kernels: ModuleType, normalize: bool) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    operation = delta_rule(TOKENS, torch.float32, normalize=normalize)
    prompt, last = ([part[None, rows] for part in operation.by_token] for rows in (slice(-1), slice(-1, None)))
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalize}
    first, state = theirs.torch_chunk_gated_delta_rule(*prompt, **options)
    second, state = theirs.torch_recurrent_gated_delta_rule(*last, initial_state=state, **options)
    for ops in (kernels, reference):
        same(continued(ops, operation), first, second, state)


def test_delta_rules_with_decays_by_row_are_those_of_transformers(kernels: ModuleType) -> None:
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    operation = delta_rule(TOKENS, torch.float32, 20)
    query, key, *others = operation.by_token
    inputs = [part[None] for part in (query.repeat_interleave(3, dim=1), key.repeat_interleave(3, dim=1), *others)]
    out, state = theirs.recurrent_kimi_delta_attention(*inputs, None, True, use_qk_l2norm_in_kernel=True)
    for ops in (kernels, reference):
        same(continued(ops, operation), out[0, :-1], out[0, -1:], state)


def test_scans_of_mamba_2_are_those_of_transformers(kernels: ModuleType) -> None:
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    operation, a = scan(TOKENS, torch.float32), -weights(4).exp()
    x, dt, b, c = operation.by_token
    prompt = [part[None, :-1] for part in (x, dt)], [part[None, :-1] for part in (b, c)]
    first, state = theirs.mamba2_chunk_scan(*prompt[0], a, *prompt[1], 16, return_final_states=True)
    second = theirs.mamba2_selective_state_update(
        state, x[-1:], dt[-1:, :, None].expand(-1, -1, 21), a[:, None, None].expand(-1, 21, 20), b[-1:], c[-1:]
    )
    for ops in (kernels, reference):
        same(continued(ops, operation), first, second, state)


@pytest.mark.parametrize(("heads", "size"), [(1, 70), (70, 1)])
def test_scans_of_mamba_are_those_of_transformers(kernels: ModuleType, heads: int, size: int) -> None:
    theirs = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    operation = scan(TOKENS, torch.float32, heads, size, 1)
    x, dt, b, c = (part.flatten(1) for part in operation.by_token)
    a, d = -weights(70, 20).exp(), weights(70)
    turned = [part[:-1].T[None] for part in (x, dt, b, c)]
    first, state = theirs.mamba_selective_scan(*turned[:2], a, *turned[2:], D=d, return_last_state=True)
    second = theirs.mamba_selective_state_update(state, x[-1:], dt[-1:], a, b[-1:], c[-1:], d)
    for ops in (kernels, reference):
        same(continued(ops, operation), first[0].T.contiguous(), second, state)
