"""Operations on states: the compiled ones against the eager ones, both against transformers', and that nothing but a
sequence's tokens changes a bit of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference
from kernels.inputs import AttentionMetadata

CPU = torch.device("cpu")
NAN = float("nan")
LENS = [(1, 1), (1, 40), (5, 5), (70, 100), (0, 7), (2, 130), (3, 3)]
"""Query tokens and context of each sequence."""


@dataclass
class Operation:
    by_token: Sequence[Tensor]
    """Inputs, [tokens, ...]."""
    state: tuple[int, ...]
    call: Callable[..., Tensor]
    """Arguments: the backend, inputs, states, metadata."""
    state_dtype: torch.dtype = torch.float32


def tensors(tokens: int, dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[Tensor]:
    """Numbers of [tokens, *sizes]. Tokens lie further apart than they are long, as parts of a fused projection do."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(tokens, size[0] + 1, *size[1:], generator=generator).to(dtype)[:, : size[0]] for size in sizes]


def weights(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(3))


def convolution(tokens: int, dtype: torch.dtype, taps: int = 4, silu: bool = True) -> Operation:
    weight, bias = weights(300, taps).to(dtype), weights(300).to(dtype) if silu else None
    activation = "silu" if silu else None
    return Operation(
        tensors(tokens, dtype, (300,)),
        (300, taps - 1),
        lambda ops, inputs, states, metadata: ops.short_convolution(
            *inputs, weight, bias, states, metadata, activation
        ),
        dtype,
    )


def delta_rule(
    tokens: int, dtype: torch.dtype, decays: int = 1, has_beta: bool = True, normalize: bool = True
) -> Operation:
    query, key, value = tensors(tokens, dtype, (2, 20), (2, 20), (6, 37))
    (decay,) = tensors(tokens, torch.float32, (6, decays))
    decay, beta = -functional.softplus(decay), value[..., 0].sigmoid()
    if not normalize:
        key = key / 5
    return Operation(
        [query, key, value, decay if decays > 1 else decay[..., 0], beta],
        (6, 20, 37),
        lambda ops, inputs, states, metadata: ops.gated_delta_rule(
            *inputs[:4], inputs[4] if has_beta else None, states, metadata, normalize
        ),
    )


def scan(tokens: int, dtype: torch.dtype, heads: int = 4, size: int = 21, groups: int = 2) -> Operation:
    """With one head, or heads of one row, Mamba: each row has its own dt and D, and each number of the state its A."""
    x, b, c = tensors(tokens, dtype, (heads, size), (groups, 20), (groups, 20))
    (dt,) = tensors(tokens, torch.float32, (heads, size))
    dt, is_mamba = functional.softplus(dt), heads == 1 or size == 1
    a, d = (-weights(heads, size, 20).exp(), weights(heads, size)) if is_mamba else (-weights(heads).exp(), None)
    return Operation(
        [x, dt if is_mamba else dt[..., 0], b, c],
        (heads, size, 20),
        lambda ops, inputs, states, metadata: ops.selective_scan(*inputs[:2], a, *inputs[2:], d, states, metadata),
    )


OPERATIONS: dict[str, Callable[[int, torch.dtype], Operation]] = {
    "convolution": convolution,
    "convolution_of_3": lambda tokens, dtype: convolution(tokens, dtype, 3, False),
    "delta_rule": delta_rule,
    "delta_rule_by_row": lambda tokens, dtype: delta_rule(tokens, dtype, 20, normalize=False),
    "linear_attention": lambda tokens, dtype: delta_rule(tokens, dtype, has_beta=False, normalize=False),
    "mamba_2": scan,
    "mamba": lambda tokens, dtype: scan(tokens, dtype, 1, 70, 1),
    "mamba_by_heads": lambda tokens, dtype: scan(tokens, dtype, 70, 1, 1),
}
each_operation = pytest.mark.parametrize("make", OPERATIONS.values(), ids=OPERATIONS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def pool_for(operation: Operation, num_blocks: int) -> Tensor:
    """States in blocks that are neither aligned nor adjacent, NaN."""
    size = torch.Size(operation.state).numel()
    pool = torch.full((num_blocks, size + 3), NAN, dtype=operation.state_dtype)
    return pool[:, 1 : size + 1].unflatten(1, operation.state)


def batch(lens: Sequence[tuple[int, int]], blocks: Sequence[int]) -> AttentionMetadata:
    return AttentionMetadata.build(
        [n for n, _ in lens], [context for _, context in lens], torch.tensor(blocks).view(-1, 1), CPU
    )


def case(operation: Operation) -> tuple[Tensor, AttentionMetadata]:
    """States of the sequences that continue, NaN in all other blocks; and the metadata of LENS."""
    blocks = [5, 0, 7, 3, 99, 1, 6]  # nothing is computed of the fifth
    states = pool_for(operation, 9)
    for (query_len, context), block in zip(LENS, blocks, strict=True):
        if 0 < query_len < context:
            states[block] = weights(*operation.state) / 2
    return states, batch(LENS, blocks)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)


@each_operation
@both_dtypes
def test_an_operation_is_the_references(
    kernels: ModuleType, make: Callable[[int, torch.dtype], Operation], dtype: torch.dtype
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
    kernels: ModuleType, make: Callable[[int, torch.dtype], Operation], dtype: torch.dtype
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
def test_a_step_without_sequences_is_nothing(
    kernels: ModuleType, make: Callable[[int, torch.dtype], Operation]
) -> None:
    operation = make(0, torch.bfloat16)
    for ops in (kernels, reference):
        found = operation.call(ops, operation.by_token, pool_for(operation, 1), batch([], []))
        assert found.shape[0] == 0


@each_operation
def test_a_block_outside_the_pool_is_refused(
    kernels: ModuleType, make: Callable[[int, torch.dtype], Operation]
) -> None:
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
