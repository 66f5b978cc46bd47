"""The small operations do what their formulas say."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.inputs import rotary_tables
from kernels.linear import quantization
from kernels.ops import LoraWeights


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
    reference.rotary_embedding(x, *rotary_tables(torch.tensor(positions), frequencies, 1.0))
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


def widened(numbers: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """What weights of 4 bits stand for."""
    scale, minimum = (part.float().repeat_interleave(32, dim=1)[:, : numbers.shape[1]] for part in (scales, minimums))
    return numbers * scale - minimum


def test_weights_that_were_4_bits_once_are_found_again(generator: torch.Generator) -> None:
    """If a group has the smallest and the largest number, as GGUF's Q4_1 makes it."""
    numbers = torch.randint(0, 16, (50, 70), generator=generator)
    numbers[:, 1::32], numbers[:, 2::32] = 15, 0
    scales, minimums = torch.rand(2, 50, 3, generator=generator).half() / 10
    weight = widened(numbers, scales, minimums)
    torch.testing.assert_close(widened(*quantization.quantize_int4(weight)[:3]), weight, atol=1e-3, rtol=0)


def test_4_bits_are_nearer_than_even_steps_between_the_extremes(generator: torch.Generator) -> None:
    weight = torch.randn(64, 512, generator=generator)
    groups = weight.view(64, 16, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (high - low) / 15
    even = ((groups - low) / step).round() * step + low
    found = widened(*quantization.quantize_int4(weight)[:3])
    assert (found - weight).square().mean() < 0.93 * (even - groups).square().mean()
    assert ((found - weight).view_as(groups).abs() < 2 * step).all()


def test_equal_weights_keep_their_value_in_4_bits() -> None:
    weight = torch.tensor([[0.0], [0.25], [-3.0]]).expand(3, 40)
    torch.testing.assert_close(widened(*quantization.quantize_int4(weight)[:3]), weight)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e6])
def test_weights_that_4_bits_have_no_scale_for_are_refused(value: float) -> None:
    weight = torch.zeros(2, 64)
    weight[1, 40] = value
    with pytest.raises(ValueError, match="not finite, or too large for int4"):
        quantization.quantize_int4(weight)
