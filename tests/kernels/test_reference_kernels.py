"""The small operations do what their formulas say."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.ops import LoraWeights


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 123), (2, 3, 64)])
def test_rms_norm_is_its_formula(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected.to(dtype))


def test_gated_silu_is_its_formula(generator: torch.Generator) -> None:
    x = torch.randn(5, 246, generator=generator)
    gate, up = x[:, :123].double(), x[:, 123:].double()
    torch.testing.assert_close(reference.gated_activation(x, "silu"), (gate / (1 + (-gate).exp()) * up).float())


def rotate(x: Tensor, positions: list[int]) -> Tensor:
    frequencies = 100.0 ** -(torch.arange(x.shape[-1] // 2) * 2 / x.shape[-1])
    x = x.clone()
    reference.rotary_embedding(x, *reference.rotary_tables(torch.tensor(positions), frequencies, 1.0))
    return x


def test_a_rotation_leaves_position_zero_and_every_norm_alone(generator: torch.Generator) -> None:
    x = torch.randn(4, 3, 10, generator=generator)
    rotated = rotate(x, [0, 1, 77, 8000])
    torch.testing.assert_close(rotated[0], x[0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_products_of_rotated_heads_depend_on_their_distance_alone(generator: torch.Generator) -> None:
    query, key = torch.randn(2, 1, 3, 10, generator=generator)
    near = (rotate(query, [12]) * rotate(key, [5])).sum(-1)
    far = (rotate(query, [107]) * rotate(key, [100])).sum(-1)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_stored_keys_and_values_land_in_their_slots_and_nowhere_else(generator: torch.Generator) -> None:
    cache = torch.zeros(6, 2, 2, 4, 3, 5)  # [blocks, layers, 2, block_size, heads, head_dim]
    keys, values = torch.randn(2, 3, 3, 5, generator=generator)
    reference.store_kv(keys, values, cache[:, 1], torch.tensor([23, 0, 9]))
    for token, (block, offset) in enumerate([(5, 3), (0, 0), (2, 1)]):
        assert torch.equal(cache[block, 1, 0, offset], keys[token])
        assert torch.equal(cache[block, 1, 1, offset], values[token])
        cache[block, 1, :, offset] = 0
    assert not cache.any()


def test_copies_read_every_source_before_they_write(generator: torch.Generator) -> None:
    cache = torch.randn(4, 2, 3, generator=generator)
    before = cache.clone()
    reference.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert torch.equal(cache, before[[0, 0, 1, 3]])


def test_each_row_gains_what_its_own_adapter_makes_of_it() -> None:
    x, y = torch.randn(4, 5), torch.zeros(4, 3)
    a, b = torch.randn(2, 2, 4, 5), torch.randn(2, 4, 3)
    weights = LoraWeights(a, b, torch.tensor([1, 4], dtype=torch.int32), (0, 1, 3))
    reference.add_lora(y, x, torch.tensor([1, -1, 0, 1], dtype=torch.int32), weights)
    for row, slot, rank in ((0, 1, 4), (2, 0, 1), (3, 1, 4)):
        first = b[slot, :rank, :1].T @ (a[slot, 0, :rank] @ x[row])
        second = b[slot, :rank, 1:].T @ (a[slot, 1, :rank] @ x[row])
        torch.testing.assert_close(y[row], torch.cat((first, second)))
    assert not y[1].any()
