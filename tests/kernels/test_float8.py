"""Products of e4m3 numbers against float64, in every backend that runs here."""

from collections.abc import Iterator
from importlib import import_module, util
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.float8 import FLOAT8, Float8Weight, narrowed, quantize_float8, round_inputs, round_rows, widened
from kernels.linear.experts import grouped_float8

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["reference", "compiled", "torch's own", "torch's own, whose shapes do not fit"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """torch has the products of GPUs on a CPU too; the kernel that rounds rows for them is left out here."""
    if request.param == "reference":
        return reference
    if request.param == "compiled":
        return pytest.importorskip("kernels.cpu.ops", exc_type=ImportError, reason="the CPU's kernels are not compiled")
    if not util.find_spec("triton"):
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: test_triton_float8.py tests its products")
    module = import_module("kernels.triton.linear.float8_linear")
    monkeypatch.setattr(module, "multiplies_float8", lambda device: request.param == "torch's own")
    monkeypatch.setattr(module, "round_rows", round_rows)
    # Its kernel for several groups has tests of its own.
    monkeypatch.setattr(module, "grouped_float8", grouped_float8)
    return module


def random_weight(
    outputs: int, inputs: int, seed: int = 0, input_scale: float | None = None, groups: int = 1
) -> Float8Weight:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.rand(outputs * groups, 1, generator=draw) + 0.1
    numbers, scales, _ = quantize_float8(sizes * torch.randn(outputs * groups, inputs // groups, generator=draw))
    of_inputs = None if input_scale is None else torch.tensor(input_scale)
    return Float8Weight(numbers.view(outputs, inputs), scales.view(outputs, groups), of_inputs)


def exactly(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Dequantise and multiply, in float64."""
    numbers, scales = round_inputs(x, weight)
    of_inputs = scales.double().repeat_interleave(x.shape[1] // scales.shape[1], dim=1)
    product = (numbers.double() * of_inputs) @ widened(weight).double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("input_scale", "groups"), [(None, 1), (0.01, 1), (None, 3)])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 16, 48), (5, 48, 144), (33, 17, 123)])
def test_a_product_is_that_of_the_rounded_numbers(
    rows: int,
    outputs: int,
    inputs: int,
    input_scale: float | None,
    groups: int,
    wide: bool,
    dtype: torch.dtype,
    backend: ModuleType,
) -> None:
    weight = random_weight(outputs, inputs, input_scale=input_scale, groups=groups)
    draw = torch.Generator().manual_seed(1)
    x, bias = torch.randn(rows, inputs, generator=draw).to(dtype), torch.randn(outputs, generator=draw).to(dtype)
    for added in (None, bias):
        found = backend.pack_float8(weight, wide)(x, added)
        assert found.dtype is (torch.float32 if wide else dtype)
        # Sums of float32, rounded once.
        tolerance = 1e-5 if found.dtype is torch.float32 else 0.51 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), exactly(x, weight, added), rtol=tolerance, atol=2e-5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_product_does_not_depend_on_the_other_rows(dtype: torch.dtype, groups: int) -> None:
    for backend in (reference, import_module("kernels.backends").ops_for(torch.device("cpu"))):
        product = backend.pack_float8(random_weight(75, 254, groups=groups))
        x = torch.randn(40, 254, generator=torch.Generator().manual_seed(2)).to(dtype)
        whole = product(x, None)
        for start, stop in ((0, 1), (3, 5), (7, 24), (39, 40)):
            assert torch.equal(product(x[start:stop], None), whole[start:stop])


@pytest.mark.parametrize("wide", [False, True])
def test_a_row_that_is_not_finite_spoils_itself_alone(wide: bool, backend: ModuleType) -> None:
    product = backend.pack_float8(random_weight(16, 32), wide)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0, 3], x[2, 5] = torch.nan, -torch.inf
    found = product(x, None)
    assert found[[0, 2]].isnan().all()
    assert torch.equal(found[[1, 3]], product(x[[1, 3]], None))


def test_zeros_stay_zeros_and_huge_rows_finite(backend: ModuleType) -> None:
    product = backend.pack_float8(random_weight(16, 32))
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[1], x[2] = 1e34, 1e-36
    found = product(x, None)
    assert (found[0] == 0).all()
    assert found.isfinite().all()
    torch.testing.assert_close(found[1].double(), exactly(x, random_weight(16, 32), None)[1], rtol=0.01, atol=0)


def test_inputs_beyond_a_stored_scale_become_the_largest_number() -> None:
    x = torch.tensor([[5.0, 4.48, -1e30, torch.inf, torch.nan]])
    numbers, _ = round_inputs(x, random_weight(4, 5, input_scale=0.01))
    assert numbers.float().nan_to_num(7).tolist() == [[448, 448, -448, 448, 7]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_rounded_to_the_nearest_number_and_its_largest_one_stays(dtype: torch.dtype) -> None:
    weight = torch.randn(5000, 24, generator=torch.Generator().manual_seed(4)).to(dtype)
    weight[3] = 0
    numbers, scales, _ = quantize_float8(weight)
    assert (numbers.dtype, scales.shape) == (FLOAT8, (5000, 1))
    meant = widened(Float8Weight(numbers, scales))
    assert torch.equal(meant, numbers.float() * scales)
    largest = weight.float().abs().amax(1, keepdim=True)
    torch.testing.assert_close(meant.abs().amax(1, keepdim=True), largest)
    # 4 significant bits; below 2 to the power of -6 of 448 the steps are all alike.
    assert ((meant - weight.float()).abs() <= torch.maximum(weight.float().abs() / 16, largest / 448 / 1024)).all()
    assert (meant[3] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="a weight is not finite"):
        quantize_float8(weight)


def test_ties_go_to_even_numbers() -> None:
    wide = torch.tensor([17.0, 19.0, 21.0, 2.0**-10, 3 * 2.0**-10, -17.0])
    assert narrowed(wide, torch.tensor(1.0)).float().tolist() == [16, 20, 20, 0, 2.0**-8, -16]
