"""Products of weights that the CPU's kernels have packed, for every instruction set that this machine can run."""

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from cpu_libraries import load_cpu_libraries

from kernels.linear import quantization
from kernels.ops import GroupedWeight

TYPES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Of floating-point weights, and the relative error of their products."""


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 40), (32, 64), (75, 576), (576, 1536)])
def test_packed_weights_give_the_product(
    kernels: ModuleType, outputs: int, inputs: int, biased: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    product = kernels.pack(weight)
    assert product is not None
    error = TYPES[dtype]
    for rows in (0, 1, 2, 11, 12, 13, 25, 192, 193, 400):
        x = torch.randn(rows, inputs + 8, generator=generator).to(dtype)[:, :inputs]
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = product(x, bias)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, atol=2 * error * inputs**0.5, rtol=error)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 40), (75, 576), (33, 8194)])
def test_int8_weights_give_the_product_of_the_numbers_that_they_are(
    kernels: ModuleType, outputs: int, inputs: int, biased: bool, generator: torch.Generator
) -> None:
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    weight[:, ::40] *= 30  # a large weight costs only the weights of its own group digits
    weight[0] = 0  # groups whose numbers are all 0
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    product = kernels.pack_int8(weight)
    if not kernels._library.can_pack_int8(2):
        assert product is None
        return
    quantized, scales = quantization.quantize_int8(weight)
    scale_of = scales.repeat_interleave(quantization.WEIGHT_GROUP, dim=1)[:, :inputs]
    wide = (quantized * scale_of.float()).bfloat16().double()
    assert ((wide - weight.double()).abs() <= 0.75 * scale_of.double() + weight.double().abs() / 256).all()
    for rows in (0, 1, 12, 13, 24, 25, 193):
        x = torch.randn(rows, inputs + 8, generator=generator).bfloat16()[:, :inputs]
        expected = torch.nn.functional.linear(x.double(), wide, None if bias is None else bias.double())
        torch.testing.assert_close(product(x, bias).double(), expected, atol=0.02 * inputs**0.5, rtol=1e-2)


def test_int8_weights_are_multiplied_as_the_bf16_numbers_that_they_are(
    kernels: ModuleType, generator: torch.Generator
) -> None:
    weight = torch.randn(75, 570, generator=generator).bfloat16()
    product = kernels.pack_int8(weight, wide=True)
    if product is None:
        pytest.skip("this machine has no bf16 dot products, which int8 weights need")
    quantized, scales = quantization.quantize_int8(weight)
    scale_of = scales.repeat_interleave(quantization.WEIGHT_GROUP, dim=1)[:, :570]
    same = kernels.pack((quantized * scale_of.float()).bfloat16(), wide=True)
    for rows in (1, 12, 13, 25, 193):
        x = torch.randn(rows, 570, generator=generator).bfloat16()
        assert torch.equal(product(x, None), same(x, None))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 40), (75, 576), (33, 8194)])
def test_int4_weights_give_the_product_of_the_numbers_that_they_are(
    kernels: ModuleType, outputs: int, inputs: int, biased: bool, generator: torch.Generator
) -> None:
    """Of inputs in 8 bits, whose sums of products are exact but for float32."""
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    weight[0] = 0
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    product = kernels.pack_int4(weight, wide=True)
    exact = widened(quantization.quantize_int4(weight))
    for rows in (0, 1, 5, 6, 7, 13, 193):
        x = torch.randn(rows, inputs + 8, generator=generator).bfloat16()[:, :inputs]
        x[:, -1] = 0  # a group of it alone
        rounded = in_8_bits(x)
        assert ((rounded - x).abs() <= x.abs().amax(dim=1, keepdim=True).double() / 250).all()
        expected = torch.nn.functional.linear(rounded, exact, None if bias is None else bias.double())
        torch.testing.assert_close(product(x, bias).double(), expected, atol=2e-5 * inputs**0.5, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 40), (75, 576), (33, 8194)])
def test_weights_and_inputs_of_8_bits_give_the_product_of_the_numbers_that_they_are(
    kernels: ModuleType, outputs: int, inputs: int, biased: bool, generator: torch.Generator
) -> None:
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    weight[0] = 0
    weight[:, ::40] *= 30
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    product = kernels.pack_w8a8(weight, wide=True)
    numbers, scales = quantization.quantize_w8a8(weight)
    exact = numbers * scales.double().repeat_interleave(quantization.W8A8_GROUP, dim=1)[:, :inputs]
    assert ((exact - weight.double()).abs() <= 0.501 * scales.double().amax(dim=1, keepdim=True)).all()
    assert torch.equal(product.rows(torch.arange(outputs)).double(), exact.float().double())
    for rows in (0, 1, 5, 6, 7, 13, 193):
        x = torch.randn(rows, inputs + 8, generator=generator).bfloat16()[:, :inputs]
        x[:, -1] = 0
        expected = torch.nn.functional.linear(
            in_8_bits(x, quantization.W8A8_GROUP), exact, None if bias is None else bias.double()
        )
        found = product(x, bias)
        torch.testing.assert_close(found.double(), expected, atol=1e-4 * inputs**0.5, rtol=1e-5)
        assert all(torch.equal(product(x[row : row + 1], bias), found[row : row + 1]) for row in range(min(rows, 13)))


def test_one_scale_for_an_output_is_read_as_one_for_many_inputs(
    kernels: ModuleType, generator: torch.Generator
) -> None:
    """As compressed-tensors stores weights whose inputs are rounded too."""
    weight = random_grouped(40, 128, Kind(8, 32, True), generator)
    whole = weight._replace(scales=weight.scales[:, :1].expand(40, 4).contiguous())
    x = torch.randn(9, 128, generator=generator).bfloat16()
    expected = in_8_bits(x, quantization.W8A8_GROUP) @ widened(whole).T
    torch.testing.assert_close(kernels.pack_grouped(whole, wide=True)(x, None).double(), expected, atol=1e-3, rtol=1e-5)
    expected = in_8_bits(x) @ widened(weight).T
    torch.testing.assert_close(
        kernels.pack_grouped(weight, wide=True)(x, None).double(), expected, atol=1e-3, rtol=1e-5
    )


def widened(weight: GroupedWeight) -> torch.Tensor:
    """The weights in float64."""
    inputs = weight.numbers.shape[1]
    shared = 32 if weight.scales.shape[1] == -(-inputs // 32) else 16

    def of_each(part: torch.Tensor, place: int) -> torch.Tensor:
        found = part.double().repeat_interleave(shared, dim=1)[:, :inputs]
        return found if weight.units is None else found * weight.units[:, :, place].double().repeat_interleave(256, 1)

    scales = of_each(weight.scales, 0)
    if weight.minimums is None:
        return (weight.numbers.double() - 2 ** (weight.bits - 1)) * scales
    return weight.numbers * scales - of_each(weight.minimums, 1)


class Kind(NamedTuple):
    bits: int
    shared: int
    """Inputs with one scale."""
    is_symmetric: bool
    """Whether the number in the middle means zero."""
    has_units: bool = False

    def whole(self, inputs: int) -> int:
        """So many inputs, or a few more."""
        return -(-inputs // 256) * 256 if self.has_units else inputs


KINDS = [Kind(4, 32, False), Kind(4, 32, True), Kind(5, 32, False), Kind(5, 32, True)]
KINDS += [Kind(8, 32, False), Kind(8, 32, True), Kind(8, 16, False)]
KINDS += [Kind(4, 32, False, True), Kind(5, 32, False, True), Kind(6, 16, True, True)]


def random_grouped(outputs: int, inputs: int, kind: Kind, generator: torch.Generator) -> GroupedWeight:
    """With scales of either sign."""
    inputs = kind.whole(inputs)
    numbers = torch.randint(0, 2**kind.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales, minimums = torch.randn(2, outputs, -(-inputs // kind.shared), generator=generator).half() / 8
    units = None
    if kind.has_units:
        size = (2, *scales.shape)
        scales, minimums = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        scales = scales.view(torch.int8) if kind.is_symmetric else scales
        units = torch.randn(outputs, inputs // 256, 2 - kind.is_symmetric, generator=generator).half() / 2**10
    return GroupedWeight(numbers, scales, None if kind.is_symmetric else minimums, kind.bits, units)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 34), (31, 40), (75, 576), (33, 1010)])
def test_grouped_weights_give_the_product_of_the_numbers_that_they_are(
    kernels: ModuleType, outputs: int, inputs: int, kind: Kind, generator: torch.Generator
) -> None:
    weight = random_grouped(outputs, inputs, kind, generator)
    product = kernels.pack_grouped(weight, wide=True)
    x = torch.randn(13, kind.whole(inputs), generator=generator).bfloat16()
    expected = torch.nn.functional.linear(in_8_bits(x), widened(weight))
    found = product(x, None)
    torch.testing.assert_close(found.double(), expected, atol=2**kind.bits * 1e-5 * inputs**0.5, rtol=1e-5)
    for row in range(13):
        assert torch.equal(product(x[row : row + 1], None), found[row : row + 1])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_of_the_largest_numbers_are_exact(kernels: ModuleType, kind: Kind) -> None:
    """No sum on the way is of too few bits."""
    inputs = kind.whole(64)
    numbers = torch.tensor([0, 2**kind.bits - 1], dtype=torch.uint8)[:, None].expand(2, inputs).contiguous()
    scales, minimums = torch.ones(2, inputs // kind.shared).half(), torch.zeros(2, inputs // kind.shared).half()
    units = None
    if kind.has_units:
        scales, minimums = scales.to(torch.int8 if kind.is_symmetric else torch.uint8), minimums.to(torch.uint8)
        units = torch.ones(2, inputs // 256, 2 - kind.is_symmetric).half()
    weight = GroupedWeight(numbers, scales, None if kind.is_symmetric else minimums, kind.bits, units)
    x = torch.tensor([127.0, -127.0])[:, None].expand(2, inputs).bfloat16().contiguous()
    found = kernels.pack_grouped(weight, wide=True)(x, None)
    assert torch.equal(found.double(), x.double() @ widened(weight).T)


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind(4, 16, False), Kind(5, 16, True), Kind(6, 16, True), Kind(6, 32, True), Kind(7, 32, True)),
        *(Kind(4, 32, True, True), Kind(6, 16, False, True), Kind(8, 32, True, True)),
    ],
    ids=str,
)
def test_grouped_weights_of_another_form_are_refused(
    kernels: ModuleType, kind: Kind, generator: torch.Generator
) -> None:
    with pytest.raises(RuntimeError, match="there are no products of weights with"):
        kernels.pack_grouped(random_grouped(3, 64, kind, generator))


def test_parts_that_do_not_fit_are_refused(kernels: ModuleType, generator: torch.Generator) -> None:
    weight = random_grouped(3, 256, Kind(4, 32, False, True), generator)
    assert weight.units is not None
    for wrong, reason in [
        (weight._replace(scales=weight.scales.half()), "scales must be 24 numbers of Byte"),
        (weight._replace(units=weight.units.float()), "units must be 6 numbers of Half"),
        (weight._replace(units=weight.units[:, :, :1].contiguous()), "units must be 6 numbers of Half"),
        (random_grouped(3, 288, Kind(4, 32, False), generator)._replace(units=weight.units), "there are 288"),
        (weight._replace(units=None), "scales must be 24 numbers of Half"),
    ]:
        with pytest.raises(RuntimeError, match=reason):
            kernels.pack_grouped(wrong)


@pytest.mark.parametrize("kind", [*TYPES, *KINDS], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 34), (75, 576), (33, 1010)])
def test_rows_of_a_packed_weight_are_what_was_packed(
    kernels: ModuleType, outputs: int, inputs: int, kind: Kind | torch.dtype, generator: torch.Generator
) -> None:
    if isinstance(kind, torch.dtype):
        exact = torch.randn(outputs, inputs, generator=generator).to(kind)
        table = kernels.pack(exact)
    else:
        weight = random_grouped(outputs, inputs, kind, generator)
        exact, table = widened(weight), kernels.pack_grouped(weight)
    for wanted in ([], [outputs - 1], [0, *range(outputs), 0]):
        found = table.rows(torch.tensor(wanted, dtype=torch.int64))
        assert found.dtype is torch.float32
        assert torch.equal(found, exact[wanted].float())
    for wrong in (-1, outputs):
        with pytest.raises(RuntimeError, match=f"there is no row {wrong}"):
            table.rows(torch.tensor([0, wrong]))


def test_a_number_of_few_bits_takes_no_more_of_memory(cpu_library: ModuleType, generator: torch.Generator) -> None:
    """But for its group's scale, and minimum where there is one, and their units."""
    for kind in KINDS:
        packed = cpu_library.pack_grouped(*random_grouped(64, 256, kind, generator)[:5])
        factors = 1 if kind.is_symmetric else 2
        of_factor = 8 / kind.shared + 16 / 256 if kind.has_units else 16 / kind.shared
        assert packed.nbytes * 8 == 64 * 256 * (kind.bits + factors * of_factor)


def in_8_bits(x: torch.Tensor, size: int = 32) -> torch.Tensor:
    """As float64: for each `size` neighbours the nearest of 255 numbers."""
    rounded, largest = torch.zeros_like(x, dtype=torch.float64), torch.tensor(127.0)
    for start in range(0, x.shape[1], size):
        group = x[:, start : start + size].float()
        most = group.abs().amax(dim=1, keepdim=True)
        numbers = (group * (largest / most)).round().double() * (most / largest).double()
        rounded[:, start : start + size] = torch.where(most > 0, numbers, 0.0)
    return rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_of_floats_are_the_same_to_the_bit_with_every_instruction_set(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight, x = (torch.randn(rows, 1000, generator=generator).to(dtype) for rows in (75, 14))
    libraries = load_cpu_libraries()
    first, *others = (built.linear(x, built.pack(weight), None, 75, True) for built in libraries)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_of_integers_are_the_same_to_the_bit_with_every_instruction_set(
    kind: Kind, generator: torch.Generator
) -> None:
    libraries = load_cpu_libraries()
    weight = random_grouped(75, 1000, kind, generator)
    x = torch.randn(14, kind.whole(1000), generator=generator).bfloat16()
    first, *others = (built.linear(x, built.pack_grouped(*weight[:5]), None, 75, True) for built in libraries)
    assert all(torch.equal(first, other) for other in others)
    both = quantization.quantize_w8a8(torch.randn(75, x.shape[1], generator=generator))
    first, *others = (built.linear(x, built.pack_w8a8(*both), None, 75, True) for built in libraries)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_input_that_is_not_finite_makes_its_row_so_and_no_other(
    kernels: ModuleType, kind: Kind, generator: torch.Generator
) -> None:
    product = kernels.pack_grouped(random_grouped(40, 70, kind, generator), wide=True)
    x = torch.randn(9, kind.whole(70), generator=generator).bfloat16()
    sound = product(x, None)
    x[2, 69], x[4, 0], x[7, 33] = torch.nan, torch.inf, -torch.inf
    found = product(x, None)
    broken = torch.tensor([2, 4, 7])
    assert not found[broken].isfinite().any()
    kept = torch.tensor([0, 1, 3, 5, 6, 8])
    assert torch.equal(found[kept], sound[kept])
    both = kernels.pack_w8a8(torch.randn(40, x.shape[1], generator=generator).bfloat16(), wide=True)
    found = both(x, None)
    assert not found[broken].isfinite().any()
    assert found[kept].isfinite().all()


@pytest.mark.parametrize("packing", ["pack", "pack_int8", "pack_w8a8", "pack_int4"])
def test_a_wide_product_is_the_same_before_its_sums_are_rounded(
    kernels: ModuleType, packing: str, generator: torch.Generator
) -> None:
    weight = torch.randn(75, 576, generator=generator).bfloat16()
    bias = torch.randn(75, generator=generator).bfloat16()
    wide, rounded = getattr(kernels, packing)(weight, wide=True), getattr(kernels, packing)(weight)
    if wide is None:
        pytest.skip("this machine has no bf16 dot products, which int8 weights need")
    for rows in (0, 1, 13, 193):
        x = torch.randn(rows, 576, generator=generator).bfloat16()
        found = wide(x, bias)
        assert found.dtype is torch.float32
        if kernels.WIDE_PRODUCTS:
            assert torch.equal(found.bfloat16(), rounded(x, bias))
        if packing == "pack":
            torch.testing.assert_close(found, x.float() @ weight.float().T + bias.float(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("packing", "dtype"),
    [*(("pack", dtype) for dtype in TYPES), *((n, torch.bfloat16) for n in ("pack_int8", "pack_w8a8", "pack_int4"))],
    ids=str,
)
def test_a_row_of_a_product_is_the_same_alone_and_among_others(
    kernels: ModuleType, packing: str, dtype: torch.dtype, wide: bool, generator: torch.Generator
) -> None:
    product = getattr(kernels, packing)(torch.randn(96, 128, generator=generator).to(dtype), wide)
    if product is None:
        pytest.skip("this machine has no bf16 dot products, which int8 weights need")
    x = torch.randn(30, 128, generator=generator).to(dtype)
    for rows in (13, 30):
        together = product(x[:rows], None)
        assert all(torch.equal(product(x[row : row + 1], None), together[row : row + 1]) for row in range(rows))


def test_several_callers_and_many_threads_get_what_one_gets(kernels: ModuleType, generator: torch.Generator) -> None:
    product = kernels.pack(torch.randn(320, 64, generator=generator).bfloat16())
    x = torch.randn(40, 64, generator=generator).bfloat16()
    expected = product(x, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        with ThreadPoolExecutor(4) as callers:
            results = list(callers.map(lambda _: product(x, None), range(400)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, expected) for result in results)
