"""Latent attention as a Triton kernel against eager torch in float32; every unused slot is poisoned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import NAN, Case, make_case, ops
from torch import Tensor
from triton_helpers import DEVICE, DTYPES, HALF, INTERPRETED, quiet_interpreter, randn, strict

from kernels import reference
from kernels.inputs import AttentionMetadata
from kernels.triton import invariant

by_position = strict(invariant)
BOTH = pytest.mark.parametrize("backend", [ops, by_position], ids=["fast", "invariant"])


def latents(
    lens: list[tuple[int, int]],
    groups: int,
    head_dim: int,
    backend: SimpleNamespace,
    dtype: torch.dtype = torch.float32,
) -> Case:
    case = make_case(lens, 16, 1, groups, head_dim, dtype, backend.paged_attention)
    case.layer_cache = case.layer_cache[:, :1]
    return case


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "head_dim"), [(3, 22), (1, 8), (20, 96)])
def test_heads_of_any_number_and_size(groups: int, head_dim: int, dtype: torch.dtype, backend: SimpleNamespace) -> None:
    latents([(1, 0), (5, 0), (9, 28), (0, 5)], groups, head_dim, backend, dtype).check()
    latents([(1, 20), (1, 33)], groups, head_dim, backend, dtype).check()


@BOTH
@pytest.mark.parametrize("dtype", HALF)
def test_the_heads_of_deepseek_v3(dtype: torch.dtype, backend: SimpleNamespace) -> None:
    latents([(1, 20), (2, 3)], 128, 576, backend, dtype).check()


@BOTH
def test_long_contexts_are_split(backend: SimpleNamespace) -> None:
    latents([(1, 600), (1, 512), (1, 0), (1, 16)], 4, 22, backend).check()
    latents([(7, 600), (1, 520)], 2, 22, backend).check()


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16], ids=str)
def test_with_batch_invariance_bits_do_not_depend_on_batch_or_chunk(dtype: torch.dtype) -> None:
    """A prompt's last 9 tokens, around the end of a part: as a chunk, as two chunks, and as decodes, with others or
    alone."""
    case = latents([(9, 507), (3, 30), (1, 520)], 3, 22, by_position, dtype)
    expected = case.run()[:9]
    tables = case.metadata.block_tables

    def run(first: int, stop: int, *, beside: bool = False) -> Tensor:
        lens, rows = [stop - first], [0]
        contexts = [507 + stop]
        query = case.query[first:stop]
        if beside:
            lens, rows, contexts = [*lens, 1], [0, 2], [*contexts, 521]
            query = torch.cat((query, case.query[12:]))
        metadata = AttentionMetadata.build(lens, contexts, tables[rows].cpu(), DEVICE)
        return by_position.paged_attention(query, case.layer_cache, metadata, case.scale)[: stop - first]

    assert torch.equal(torch.cat((run(0, 4), run(4, 9, beside=True))), expected)
    assert torch.equal(torch.cat([run(row, row + 1, beside=row % 2 == 1) for row in range(3, 7)]), expected[3:7])


@BOTH
def test_a_padding_row_becomes_zero(backend: SimpleNamespace) -> None:
    """Decodes of a captured graph: contexts at a replay may be shorter than at the capture."""
    for longest in (5000, 33):  # split, and not split
        case = latents([(1, 32), (1, 4), (1, 0), (1, 0)], 3, 22, backend)
        expected = case.run()
        case.metadata.context_lens[2:] = 0
        case.metadata.block_tables[2:] = len(case.layer_cache) + 99
        case.metadata = replace(case.metadata, max_context_len=longest)
        found = case.run()
        torch.testing.assert_close(found[:2], expected[:2])
        assert not found[2:].any()


@quiet_interpreter
@BOTH
def test_a_poisoned_sequence_spoils_no_other(backend: SimpleNamespace) -> None:
    case = latents([(1, 5), (1, 520), (3, 2), (3, 0)], 3, 22, backend)
    clean = case.run()
    for row in (1, 3):
        case.layer_cache[case.metadata.block_tables[row, 0].long()] = NAN
    poisoned = case.run()
    assert torch.equal(poisoned[:1], clean[:1])
    assert torch.equal(poisoned[2:5], clean[2:5])
    assert poisoned[1].isnan().all()
    assert poisoned[5:].isnan().all()


def test_a_latent_is_stored_once() -> None:
    """And nothing behind its own slots changes, such as the next layer's."""
    keys, slots = randn(3, 1, 22), torch.tensor([5, -1, 40], device=DEVICE)
    pool = torch.zeros(4, 3, 1, 16, 1, 22, device=DEVICE)
    expected = pool.clone()
    ops.store_kv(keys, keys, pool[:, 1], slots)
    reference.store_kv(keys[::2], keys[::2], expected[:, 1], slots[::2])
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("option", [(5,), (None, 2.0), (None, None, randn(3, 9)), (None, None, None, False)], ids=str)
def test_options_are_refused(option: tuple[object, ...]) -> None:
    case = latents([(1, 5)], 3, 22, ops)
    with pytest.raises(ValueError, match="latent attention is causal, without a window, soft cap"):
        case.run(*option)


def test_no_token_and_no_sequence() -> None:
    assert latents([], 3, 22, ops).run().shape == (0, 3, 22)
