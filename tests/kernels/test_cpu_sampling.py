"""The compiled operations of a sampler against eager torch, for every instruction set that this machine can run."""

import importlib
import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.sampling import eager as sampling
from kernels.sampling import filters, noise
from kernels.sampling.eager import Draws

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARIES = [1, 7, 123, 4097, 49152]


@pytest.fixture
def ops(cpu_library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The CPU's sampling with that library."""
    backend = importlib.import_module("kernels.cpu.ops")
    monkeypatch.setattr(backend, "_library", cpu_library)
    return backend


def make_draws(
    count: int,
    generator: torch.Generator,
    temperature: float = 0.7,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Draws:
    """One draw from each row, in falling order, with seeds that have every bit set somewhere."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    keys = noise.row_keys(seeds, torch.arange(count), 3 * torch.arange(count))
    numbers = [torch.full((count,), value) for value in (temperature, min_p, top_k, top_p)]
    return Draws(torch.arange(count).flip(0), keys, *numbers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 1024, 1025, 5000])
def test_greedy_is_the_first_of_the_largest(
    ops: ModuleType, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.randn(20, columns, generator=generator).to(dtype).mul(2).round()  # full of equals
    x[0], x[1] = -math.inf, math.inf
    x[2, columns // 2] = math.nan
    x[3, 0] = math.nan
    token_ids, largest = ops.greedy(x)
    expected_ids, expected = sampling.greedy(x)
    torch.testing.assert_close(largest, expected, equal_nan=True)
    assert torch.equal(token_ids, expected_ids)


FILTERS = [
    {},
    {"temperature": 1e-38},
    {"temperature": 100.0},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.001, "top_k": 30, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.95},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_draws_are_those_of_the_eager_sampler(
    ops: ModuleType, options: dict[str, float], spread: float, generator: torch.Generator
) -> None:
    for vocabulary_size in VOCABULARIES:
        for dtype in DTYPES:
            logits = spread * torch.randn(8, vocabulary_size, generator=generator)
            logits[:, 1::7] = -math.inf
            logits[0] = logits[0, 0].item()  # all alike
            logits[1, 5:] = -math.inf  # fewer than some top_k
            logits = logits.to(dtype)
            largest = sampling.greedy(logits)[1]
            draws = make_draws(8, generator, **options)  # type: ignore[arg-type]
            assert torch.equal(ops.draw(logits, largest, draws), sampling.draw(logits, largest, draws))


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.7}], ids=str)
def test_what_the_filters_leave_is_all_that_is_drawn_and_all_of_it(
    ops: ModuleType, options: dict[str, float], generator: torch.Generator
) -> None:
    """Equals are kept together."""
    row = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0, 1.5, 1.0, -math.inf]).repeat(10)
    row[8:] -= 3
    draws = make_draws(20_000, generator, 1.0, **options)  # type: ignore[arg-type]
    (threshold,) = filters.filter_thresholds(
        row[None] - 2, *(numbers[:1] for numbers in (draws.min_p, draws.top_k, draws.top_p))
    )
    drawn = ops.draw(row.repeat(20_000, 1), torch.full((20_000,), 2.0), draws)
    assert drawn.unique().tolist() == (row - 2 >= threshold).nonzero().flatten().tolist()


def test_every_row_is_drawn_in_its_own_way(ops: ModuleType, generator: torch.Generator) -> None:
    """Also two draws from one row, which differ in everything."""
    logits = 3 * torch.randn(4, 4097, generator=generator)
    count = 40
    draws = replace(
        make_draws(count, generator),
        rows=torch.randint(0, 4, (count,), generator=generator),
        temperature=torch.tensor([1e-38, 0.5, 1.0, 3.0]).repeat(10),
        min_p=torch.tensor([0.0, 0.0, 0.02, 1.0, 0.3]).repeat(8),
        top_k=torch.tensor([0, 0, 1, 50, 10**6, 7, 0, 2000]).repeat(5),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.1, 0.0, 2.0, -1.0, 0.999, 1.0, 0.5]).repeat(4),
    )
    largest = sampling.greedy(logits)[1]
    assert torch.equal(ops.draw(logits, largest, draws), sampling.draw(logits, largest, draws))


@pytest.mark.parametrize("places", [(70, 4), (4, 70), (3, 4), (64, 127)])
def test_of_two_equal_scores_that_of_the_lower_id_wins(ops: ModuleType, places: tuple[int, int]) -> None:
    """Wherever in the row they stand, and whichever has the larger logit: it is scores that are equal."""
    first, second = places
    one, key = torch.ones(1), torch.tensor([12345])
    draws = Draws(torch.tensor([0]), key, one, 0 * one, torch.tensor([0]), one)
    all_noise = noise.gumbel_noise(key, 200)[0]
    logits = torch.full((1, 200), -math.inf)
    logits[0, first] = 0.0
    for step in range(-2000, 2000):  # sums are rounded, so that one of the values near this one makes them equal
        logits[0, second] = float(all_noise[first] - all_noise[second]) + step * 2.0**-24
        top = logits.max()
        scores = logits[0] - top + all_noise
        if scores[first] == scores[second]:
            break
    else:
        pytest.fail("no logit makes both scores equal")
    assert sampling.draw(logits, logits.max(-1).values, draws).tolist() == [min(places)]
    assert ops.draw(logits, logits.max(-1).values, draws).tolist() == [min(places)]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"min_p": 1.5},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"top_p": math.nan},
    ],
    ids=str,
)
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_values_that_no_request_can_have_are_refused(
    ops: ModuleType, options: dict[str, float], filters: dict[str, float], generator: torch.Generator
) -> None:
    draws = make_draws(2, generator, **filters | options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="draw 0: temperature must be above 0 and finite"):
        ops.draw(torch.zeros(2, 100), torch.zeros(2), draws)


@pytest.mark.parametrize("options", [{}, {"min_p": 0.5, "top_p": 0.5}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("said", [-5.0, 5.0, 1e38])
def test_a_largest_that_is_none_draws_some_token(
    ops: ModuleType, options: dict[str, float], said: float, generator: torch.Generator
) -> None:
    logits = torch.randn(3, 200, generator=generator)
    logits[2, 100] = math.nan
    draws = make_draws(3, generator, **options)  # type: ignore[arg-type]
    assert all(0 <= token_id < 200 for token_id in ops.draw(logits, torch.full((3,), said), draws).tolist())


def key_of(uniform_bits: int) -> int:
    """A key whose high half is 0, for which token 0 gets these 23 bits: the hash is undone."""
    bits = uniform_bits << 9
    for shift, factor in ((15, 0x735A2D97), (15, 0x21F0AAAD)):
        bits = bits ^ bits >> shift ^ bits >> 2 * shift
        bits = bits * pow(factor, -1, 2**32) % 2**32
    return bits ^ bits >> 16


@pytest.mark.parametrize("uniform_bits", [2**23 - 1, 2**23 - 2, 2**23 - 100, 2**22, 1])
@pytest.mark.parametrize("margin", [1e-3, -1e-3])
def test_a_token_wins_as_soon_as_its_noise_carries_it_above_all_others(
    ops: ModuleType, uniform_bits: int, margin: float
) -> None:
    """Also the most unlikely one, which has 16.6355 to make up for. The other token is in another part of the row."""
    key = torch.tensor([key_of(uniform_bits)])
    all_noise = noise.gumbel_noise(key, 100)[0]
    assert all_noise[0] == pytest.approx(-math.log(-math.log((uniform_bits + 0.5) * 2.0**-23)), rel=1e-5)
    logits = torch.full((1, 100), -math.inf)
    logits[0, 99] = max(0.0, float(all_noise[0] - all_noise[99]))
    logits[0, 0] = logits[0, 99] - (all_noise[0] - all_noise[99]) + margin
    one = torch.ones(1)
    draws = Draws(torch.tensor([0]), key, one, 0 * one, torch.tensor([0]), one)
    expected = 0 if margin > 0 else 99
    assert ops.draw(logits, logits.max(-1).values, draws).tolist() == [expected]


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_poisoned_row_is_drawn_from_alone(
    ops: ModuleType, options: dict[str, float], generator: torch.Generator
) -> None:
    logits = torch.randn(5, 4_200, generator=generator)
    logits[0, 4_150], logits[2, 0], logits[4] = math.nan, math.inf, -math.inf
    largest = ops.greedy(logits)[1]
    assert largest.isfinite().tolist() == [False, True, False, True, False]
    draws = make_draws(5, generator, **options)  # type: ignore[arg-type]
    found = ops.draw(logits, largest, draws)
    expected = sampling.draw(logits, largest, draws)
    assert torch.equal(found[[1, 3]], expected[[1, 3]])
    assert all(0 <= token_id < 4_200 for token_id in found.tolist())


@pytest.mark.parametrize("vocabulary_size", [1, 7, 8, 9, 123, 4097])
def test_only_tokens_whose_bit_is_set_are_kept(
    ops: ModuleType, vocabulary_size: int, generator: torch.Generator
) -> None:
    logits = torch.randn(6, vocabulary_size, generator=generator)
    rows = torch.tensor([4, 0, 3])
    bits = torch.randint(0, 256, (3, -(-vocabulary_size // 32) * 4), dtype=torch.uint8, generator=generator)
    bits[1, ::2], bits[2] = 0xFF, 0
    kept = [[int(bits[row, token // 8]) >> token % 8 & 1 for token in range(vocabulary_size)] for row in range(3)]
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~torch.tensor(kept, dtype=torch.bool), -math.inf)
    for backend in (ops, sampling):
        found = logits.clone()
        backend.keep(found, rows, bits)
        assert torch.equal(found, expected)


def test_what_does_not_fit_is_refused(ops: ModuleType, generator: torch.Generator) -> None:
    logits, draws = torch.randn(2, 9, generator=generator), make_draws(3, generator)
    with pytest.raises(RuntimeError, match="there is no row 2"):
        ops.draw(logits, logits.max(-1).values, draws)
    with pytest.raises(RuntimeError, match="largest must be 2 numbers"):
        ops.draw(logits, logits.max(), draws)
    with pytest.raises(RuntimeError, match="a bit for every token"):
        ops.keep(logits, torch.tensor([0]), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="there is no row -1"):
        ops.keep(logits, torch.tensor([-1]), torch.zeros(1, 2, dtype=torch.uint8))


def test_no_rows(ops: ModuleType, generator: torch.Generator) -> None:
    none: Tensor = ops.draw(torch.empty(0, 9), torch.empty(0), make_draws(0, generator))
    assert none.shape == (0,)
    ops.keep(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.uint8))
