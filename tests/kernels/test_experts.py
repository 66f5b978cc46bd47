"""The operations of a mixture of experts do what their formulas say, and no row's numbers depend on those beside it."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.linear.experts import Routing, choose_by_groups, choose_experts, group_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALONE = [range(1), range(17, 18), range(40, 41)]
STRETCHES = [*ALONE, range(2), range(3), range(15, 19), range(1, 17), range(7, 40), range(41)]
"""Of 41 rows; products of any of them must be those of all."""


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (5, 2), (128, 8), (6, 6)])
def test_a_token_has_the_experts_of_the_largest_probabilities(
    num_experts: int, num_chosen: int, renormalise: bool, generator: torch.Generator
) -> None:
    logits = 4 * torch.randn(41, num_experts, generator=generator)
    weights, experts = choose_experts(logits, num_chosen, renormalise)
    expected, expected_experts = logits.double().softmax(1).topk(num_chosen)
    if renormalise:
        expected /= expected.sum(1, keepdim=True)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected.float())
    for rows in STRETCHES:
        alone = choose_experts(logits[rows.start : rows.stop], num_chosen, renormalise)
        assert torch.equal(alone[0], weights[rows.start : rows.stop])
        assert torch.equal(alone[1], experts[rows.start : rows.stop])


def test_of_equal_logits_the_lowest_numbers_are_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0], [0.0] * 5])
    assert choose_experts(logits, 3, True)[1].tolist() == [[1, 3, 4], [0, 1, 2]]
    assert choose_experts(torch.zeros(3, 4096), 5, False)[1].tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize(("num_groups", "num_chosen_groups"), [(1, 1), (4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize(("is_sigmoid", "sums_pairs"), [(False, False), (False, True), (True, False)])
def test_a_token_has_the_experts_of_its_best_groups(
    is_sigmoid: bool, sums_pairs: bool, num_groups: int, num_chosen_groups: int, generator: torch.Generator
) -> None:
    """Against one token and one group after the other. The bias, of V3 only, chooses and is in no weight."""
    routing = Routing(12, 2, is_sigmoid, is_sigmoid, 1.5, num_groups, num_chosen_groups, sums_pairs=sums_pairs)
    logits, bias = 2 * torch.randn(41, 12, generator=generator), torch.randn(12, generator=generator) / 4
    given = logits.sigmoid() if is_sigmoid else logits.softmax(1)
    weights, experts = choose_by_groups(given, bias if is_sigmoid else None, routing)
    for row, found, chosen in zip(logits.double(), weights, experts, strict=True):
        scores = row.sigmoid() if is_sigmoid else row.softmax(0)
        ranked = (scores + bias if is_sigmoid else scores).tolist()
        size = 12 // num_groups
        groups = [range(start, start + size) for start in range(0, 12, size)]
        count = 2 if is_sigmoid or sums_pairs else 1
        best = [sum(sorted((ranked[e] for e in group), reverse=True)[:count]) for group in groups]
        kept = sorted(range(num_groups), key=lambda group: -best[group])[:num_chosen_groups]
        expected = sorted((e for group in kept for e in groups[group]), key=lambda expert: -ranked[expert])[:2]
        assert chosen.tolist() == expected
        shares = scores[expected]
        torch.testing.assert_close(found, 1.5 * (shares / shares.sum() if is_sigmoid else shares).float())
    alone = choose_by_groups(given[7:8], bias if is_sigmoid else None, routing)
    assert torch.equal(alone[0], weights[7:8])
    assert choose_by_groups(torch.zeros(3, 12), None, routing)[1].tolist() == [[0, 1]] * 3


def test_rows_of_an_expert_lie_together_in_the_order_of_their_tokens() -> None:
    experts = torch.tensor([[3, 0], [1, 3], [0, 1], [3, 1]])
    rows = group_rows(experts, 5)
    assert rows.ends.tolist() == [2, 5, 5, 8, 8]
    assert rows.tokens.tolist() == [0, 2, 1, 2, 3, 0, 1, 3]
    assert rows.places.tolist() == [[5, 0], [2, 6], [1, 3], [7, 4]]


def test_what_is_launched_for_experts_depends_on_shapes_alone() -> None:
    """On the meta device there are no values to look at; a captured graph can be replayed for other ones."""
    logits = torch.empty(41, 5, device="meta")
    for renormalise in (False, True):
        weights, experts = choose_experts(logits, 2, renormalise)
        rows = group_rows(experts, 5)
        assert [tensor.shape for tensor in (weights, *rows)] == [(41, 2), (82,), (41, 2), (5,)]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [[0, 17, 18, 18, 41], [41, 41, 41, 41, 41], [8, 16, 24, 32, 41]])
def test_each_row_is_multiplied_with_its_own_experts_weight(
    ends: list[int], dtype: torch.dtype, wide: bool, generator: torch.Generator
) -> None:
    x = torch.randn(41, 37, generator=generator).to(dtype)
    weights = torch.randn(5, 13, 37, generator=generator).to(dtype)
    found = reference.grouped_linear(x, weights, torch.tensor(ends), wide)
    expert = torch.searchsorted(torch.tensor(ends), torch.arange(41), right=True)
    expected = torch.einsum("ri,roi->ro", x.double(), weights[expert].double())
    assert found.dtype is (torch.float32 if wide else dtype)
    tolerance = 1e-4 if found.dtype is torch.float32 else 4e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_experts_return_is_summed_up_by_weight(dtype: torch.dtype, generator: torch.Generator) -> None:
    rows = torch.randn(41 * 3, 123, generator=generator).to(dtype)
    places = torch.randperm(41 * 3, generator=generator).view(41, 3)
    weights = torch.rand(41, 3, generator=generator)
    found = reference.combine_rows(rows, places, weights)
    expected = (rows[places].double() * weights.double()[:, :, None]).sum(1)
    torch.testing.assert_close(found, expected.float())
    for some in STRETCHES:
        part = slice(some.start, some.stop)
        assert torch.equal(reference.combine_rows(rows, places[part], weights[part]), found[part])


def check_rows_alike(backend: ModuleType, weight: Tensor, x: Tensor) -> None:
    bias = torch.ones(len(weight), dtype=weight.dtype)
    for wide in (False, True):
        product = backend.pack_batch_invariant(weight, wide)
        found = product(x, None)
        assert found.dtype is (torch.float32 if wide else x.dtype)
        tolerance = 1e-3 if found.dtype is torch.float32 else 0.3
        torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=tolerance, rtol=1e-2)
        for rows in STRETCHES:
            assert torch.equal(product(x[rows.start : rows.stop], None), found[rows.start : rows.stop])
        torch.testing.assert_close(product(x, bias).float(), found.float() + 1, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (13, 123), (200, 96), (64, 1026)])
def test_products_that_are_packed_alike_sum_up_a_row_the_same_alone_and_among_others(
    outputs: int, inputs: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight, x = (torch.randn(rows, inputs, generator=generator).to(dtype) for rows in (outputs, 41))
    check_rows_alike(reference, weight, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (13, 123), (200, 96), (64, 1026)])
def test_compiled_products_that_are_packed_alike_do_so_too(
    kernels: ModuleType, outputs: int, inputs: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight, x = (torch.randn(rows, inputs, generator=generator).to(dtype) for rows in (outputs, 41))
    check_rows_alike(kernels, weight, x)
