"""Products of weights in MXFP4 are those of the same weights in bfloat16, to the bit."""

from types import ModuleType

import pytest
import torch

from kernels import reference
from kernels.linear.mx_float4 import MAX_SCALE, widened
from kernels.ops import MxFloat4Weight

SIZES = [(1, 32), (31, 64), (75, 96), (128, 576)]


def random_weight(
    outputs: int, inputs: int, generator: torch.Generator, scales: tuple[int, int] = (110, 135)
) -> MxFloat4Weight:
    """With every number, of either sign."""
    numbers = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    return MxFloat4Weight(
        numbers, torch.randint(*scales, (outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    )


def test_numbers_are_those_of_the_standard() -> None:
    weight = MxFloat4Weight(torch.arange(16, dtype=torch.uint8).repeat(2)[None], torch.tensor([[128]]).byte())
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert widened(weight).tolist() == [[*positive, *(-number for number in positive)] * 2]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_those_of_the_weights_in_bf16(
    kernels: ModuleType, outputs: int, inputs: int, wide: bool, generator: torch.Generator
) -> None:
    """With 1 to 193 rows, which are one tile or many, and with scales of every size."""
    weight = random_weight(outputs, inputs, generator)
    product, same = kernels.pack_mx_float4(weight, wide), kernels.pack(widened(weight).bfloat16(), wide)
    bias = torch.randn(outputs, generator=generator).bfloat16()
    for rows in (0, 1, 2, 3, 7, 12, 13, 25, 193):
        x = torch.randn(rows, inputs + 8, generator=generator).bfloat16()[:, :inputs]
        assert torch.equal(product(x, None), same(x, None))
        assert torch.equal(product(x, bias), same(x, bias))


def test_a_row_of_a_product_is_the_same_alone_and_among_others(kernels: ModuleType, generator: torch.Generator) -> None:
    product = kernels.pack_mx_float4(random_weight(75, 96, generator))
    x = torch.randn(40, 96, generator=generator).bfloat16()
    x[7, 5], x[9, 0] = torch.nan, torch.inf
    together = product(x, None)
    for row in range(40):
        torch.testing.assert_close(product(x[row : row + 1], None)[0], together[row], rtol=0, atol=0, equal_nan=True)


def test_weights_of_the_least_and_the_largest_scales(kernels: ModuleType, generator: torch.Generator) -> None:
    """Weights below 2**-123 are zeros. A scale with which some are infinite is refused."""
    x = torch.ones(1, 32).bfloat16()
    for scale, expected in ((0, 0.0), (1, 0.0), (2, 6 * 2.0**-125), (MAX_SCALE, 6 * 2.0**125)):
        numbers = torch.zeros(1, 32).byte()
        numbers[0, 31] = 7
        weight = MxFloat4Weight(numbers, torch.tensor([[scale]]).byte())
        assert kernels.pack_mx_float4(weight, wide=True)(x, None).item() == expected
    with pytest.raises(ValueError, match=r"a scale is above 2 to the power of 125"):
        kernels.pack_mx_float4(random_weight(3, 32, generator, (MAX_SCALE + 1, MAX_SCALE + 2)))


def test_a_packed_weight_takes_4_bits_and_a_scale_for_32(cpu_library: ModuleType, generator: torch.Generator) -> None:
    packed = cpu_library.pack_mx_float4(*random_weight(64, 256, generator))
    assert packed.nbytes * 8 == 64 * 256 * 4.25


def test_what_was_not_packed_for_a_product_is_refused(cpu_library: ModuleType, generator: torch.Generator) -> None:
    packed = cpu_library.pack_mx_float4(*random_weight(40, 64, generator))
    for outputs, inputs in ((40, 192), (72, 64)):
        with pytest.raises(RuntimeError, match="the weight was not packed for"):
            cpu_library.linear(torch.zeros(1, inputs).bfloat16(), packed, None, outputs, False)
    with pytest.raises(RuntimeError, match="cannot be packed"):
        cpu_library.pack_mx_float4(torch.zeros(2, 40).byte(), torch.zeros(2, 2).byte())


def test_eager_torch_has_no_such_products(generator: torch.Generator) -> None:
    assert reference.pack_mx_float4(random_weight(3, 32, generator)) is None
