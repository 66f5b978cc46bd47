"""The random numbers are what the formula says, uniform, and independent of everything but their counters."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling.noise import gumbel_noise, random_bits, row_keys, uniform_noise

M32, M64 = 2**32 - 1, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def plain_bits(seed: int, index: int, position: int, token: int) -> int:
    """The documented formula in Python's unbounded integers."""
    key = mix64(seed + GOLDEN & M64)
    key = mix64(key + index * GOLDEN & M64)
    key = mix64(key + position * GOLDEN & M64)
    bits = token * 0x9E3779B1 + (key & M32) & M32
    bits = (bits ^ bits >> 16) * 0x21F0AAAD & M32
    bits = (bits ^ bits >> 15 ^ key >> 32) * 0x735A2D97 & M32
    return bits ^ bits >> 15


def keys(*rows: tuple[int, int, int]) -> torch.Tensor:
    """Keys of (seed, index, position)."""
    seeds, indices, positions = zip(*rows, strict=True)
    signed = [seed - (seed >> 63 << 64) for seed in seeds]
    return row_keys(torch.tensor(signed), torch.tensor(indices), torch.tensor(positions))


rows = st.tuples(st.integers(0, M64), st.integers(0, M32), st.integers(0, 2**20))


@given(st.lists(rows, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_the_bits_are_those_of_the_formula(batch: list[tuple[int, int, int]]) -> None:
    found = random_bits(keys(*batch), 40)
    for row, counters in enumerate(batch):
        assert [bits & M32 for bits in found[row].tolist()] == [plain_bits(*counters, token) for token in range(40)]


def test_golden_values() -> None:
    """Written down so that no later kernel changes what a seed samples."""
    assert [bits & M32 for bits in random_bits(keys((0, 0, 0)), 3)[0].tolist()] == [3307141715, 2391080088, 4160458554]
    assert [bits & M32 for bits in random_bits(keys((M64, 3, 1000)), 3)[0].tolist()] == [
        37521491,
        3135482223,
        2860575268,
    ]


def test_uniform_numbers_are_exact_and_inside_the_open_interval() -> None:
    found = uniform_noise(keys((7, 1, 9)), 50_000)[0].double()
    expected = [((plain_bits(7, 1, 9, token) >> 9) + 0.5) * 2.0**-23 for token in range(50_000)]
    assert found.tolist() == expected
    assert found.min() > 0
    assert found.max() < 1


def assert_uniform(numbers: torch.Tensor) -> None:
    """Chi-squared over 256 bins: mean 255, standard deviation 22.6; five deviations are allowed."""
    counts = torch.histc(numbers.flatten(), 256, 0, 1).double()
    expected = numbers.numel() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


def test_numbers_are_uniform_over_tokens_positions_seeds_and_indices() -> None:
    assert_uniform(uniform_noise(keys((0, 0, 0)), 200_000))
    assert_uniform(uniform_noise(keys(*((5, 0, position) for position in range(20_000))), 10))
    assert_uniform(uniform_noise(keys(*((seed, 0, 3) for seed in range(20_000))), 10))
    assert_uniform(uniform_noise(keys(*((5, index, 3) for index in range(20_000))), 10))


def test_neighbouring_counters_are_not_correlated() -> None:
    numbers = uniform_noise(keys(*((1, 0, position) for position in range(1000))), 1000) - 0.5
    bound = 5 / 12 / 1000  # five standard deviations of the mean of a million products of variance 1/144
    assert abs(float((numbers[1:] * numbers[:-1]).mean())) < bound
    assert abs(float((numbers[:, 1:] * numbers[:, :-1]).mean())) < bound
    other_seed = uniform_noise(keys(*((2, 0, position) for position in range(1000))), 1000) - 0.5
    assert abs(float((numbers * other_seed).mean())) < bound


def test_a_row_does_not_depend_on_the_batch_or_the_vocabulary() -> None:
    batch = gumbel_noise(keys((1, 0, 5), (99, 2, 7), (M64, 0, 0)), 1000)
    assert torch.equal(gumbel_noise(keys((99, 2, 7)), 1000)[0], batch[1])
    assert torch.equal(gumbel_noise(keys((99, 2, 7)), 600)[0], batch[1, :600])


def test_argmax_with_gumbel_noise_draws_from_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    noise = gumbel_noise(keys(*((3, 0, position) for position in range(40_000))), 4)
    drawn = (probabilities.log() + noise).argmax(-1).bincount(minlength=4) / 40_000
    torch.testing.assert_close(drawn, probabilities, atol=0.01, rtol=0)
