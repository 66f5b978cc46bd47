"""Numbers of 8 bits that share a scale."""

import pytest
import torch

from kernels import reference
from kernels.attention.narrow_cache import head_dim_of, narrowed, stored_size, widened
from kernels.inputs import AttentionMetadata


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_number_is_within_half_a_step(dtype: torch.dtype) -> None:
    heads = (torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    stored = narrowed(heads)
    assert stored.dtype is torch.int8
    assert stored.shape[-1] == stored_size(64, torch.int8) == stored_size(64, dtype) + 4
    assert head_dim_of(stored) == head_dim_of(heads) == 64
    step = heads.float().abs().amax(dim=-1, keepdim=True) / 127
    assert ((widened(stored, torch.float32) - heads.float()).abs() <= 0.5001 * step).all()


def test_zeros_stay_zeros_and_what_is_not_finite_is_nan() -> None:
    heads = torch.zeros(4, 8)
    heads[1, 3], heads[2, 7], heads[3, 0] = float("inf"), float("nan"), -float("inf")
    found = widened(narrowed(heads), torch.float32)
    assert torch.equal(found[0], heads[0])
    assert found[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_in_8_bits_is_attended_to_as_what_it_means(dtype: torch.dtype, generator: torch.Generator) -> None:
    keys, values = torch.randn(2, 20, 2, 8, generator=generator).to(dtype)
    slots = torch.randperm(24, generator=generator)[:20]
    stored = torch.full((6, 2, 4, 2, 12), 77, dtype=torch.int8)
    reference.store_kv(keys, values, stored, slots)
    assert torch.equal(stored[slots // 4, 0, slots % 4], narrowed(keys))
    assert torch.equal(stored[slots // 4, 1, slots % 4], narrowed(values))
    assert (stored == 77).flatten(3).all(dim=-1).sum() == 2 * 4  # the slots that are left
    query = torch.randn(5, 4, 8, generator=generator).to(dtype)
    metadata = AttentionMetadata.build([4, 1], [9, 13], torch.tensor([[0, 3, 5, 0], [4, 1, 2, 3]]), torch.device("cpu"))
    found = reference.paged_attention(query, stored, metadata, 0.3, window=6)
    assert torch.equal(found, reference.paged_attention(query, widened(stored, dtype), metadata, 0.3, window=6))
