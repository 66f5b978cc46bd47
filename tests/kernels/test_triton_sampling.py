"""The sampler's operations as Triton kernels against eager torch: the same bits, the same tokens."""

import math

import pytest
import torch
from torch import Tensor
from triton_helpers import DEVICE, DTYPES, quiet_interpreter, randn, strict, triton

from kernels.sampling import eager as sampling
from kernels.sampling import filters, noise
from kernels.sampling import log_probabilities as eager_log_probabilities
from kernels.sampling.eager import Draws
from kernels.triton import sampling as backend
from kernels.triton.sampling.filter_thresholds import filter_thresholds
from kernels.triton.sampling.noise import gumbel_noise, random_bits

pytestmark = quiet_interpreter  # numpy warns of the infinities that bans and padding are made of

ops = strict(backend)
tl = triton.language
VOCABULARIES = [1, 123, 4097, 8193]


def keys(count: int) -> Tensor:
    """Keys of seeds with every bit set somewhere."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(5))
    seeds[0] = -1
    return noise.row_keys(seeds, torch.arange(count), 3 * torch.arange(count)).to(DEVICE)


def make_draws(count: int, temperature: float = 0.7, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Draws:
    """One draw from each row, in falling order."""
    rows = torch.arange(count, device=DEVICE).flip(0)
    fractions = (torch.full((count,), value, device=DEVICE) for value in (temperature, min_p, top_p))
    temperatures, min_ps, top_ps = fractions
    return Draws(rows, keys(count), temperatures, min_ps, torch.full_like(rows, top_k), top_ps)


def logits_of(rows: int, vocabulary_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a wider matrix, with bans."""
    logits = 3 * randn(rows, vocabulary_size + 3, dtype=dtype)[:, :vocabulary_size]
    logits[:, 1::7] = -math.inf
    return logits


@triton.jit
def _noise_kernel(keys, bits, gumbel, columns: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, columns)
    key = tl.load(keys + row)
    tl.store(bits + row * columns + token, random_bits(key, token).to(tl.int32, bitcast=True))
    tl.store(gumbel + row * columns + token, gumbel_noise(key, token))


def test_random_numbers_have_the_bits_of_the_eager_ones() -> None:
    count, columns = 8, 32768
    bits = torch.empty((count, columns), dtype=torch.int32, device=DEVICE)
    gumbel = torch.empty((count, columns), device=DEVICE)
    _noise_kernel[(count,)](keys(count), bits, gumbel, columns=columns, enable_fp_fusion=True)
    assert torch.equal(bits, noise.random_bits(keys(count), columns))
    torch.testing.assert_close(gumbel, noise.gumbel_noise(keys(count), columns), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("uniform_bits", [0, 1, 2**23 - 1, 2**23 - 2])
def test_the_rarest_numbers_are_as_exact_as_all(uniform_bits: int) -> None:
    """Near 0 and 1, where a fast logarithm would be far off. Keys are made for them by undoing the hash."""
    bits = uniform_bits << 9
    low = invert(bits)
    key = torch.tensor([low - (low >> 31 << 32)], device=DEVICE) & 0xFFFFFFFF
    found = torch.empty((1, 16), device=DEVICE)
    _noise_kernel[(1,)](key, torch.empty_like(found, dtype=torch.int32), found, columns=16, enable_fp_fusion=True)
    exact = -math.log(-math.log((uniform_bits + 0.5) * 2.0**-23))
    assert found[0, 0].item() == pytest.approx(exact, rel=1e-6)


def invert(bits: int) -> int:
    """The low half of a key whose high half is 0, for which token 0 gets these bits."""
    for shift, factor in ((15, 0x735A2D97), (15, 0x21F0AAAD)):
        bits = bits ^ bits >> shift ^ bits >> 2 * shift
        bits = bits * pow(factor, -1, 2**32) % 2**32
    return bits ^ bits >> 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary_size", VOCABULARIES)
def test_greedy_takes_the_largest(vocabulary_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(5, vocabulary_size, dtype)
    token_ids, largest = ops.greedy(logits)
    expected_ids, expected = sampling.greedy(logits)
    assert torch.equal(token_ids, expected_ids)
    assert torch.equal(largest.to(dtype), expected)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 20_000, device=DEVICE)
    logits[1, [19_000, 9_000, 8_999]] = 2.0
    logits[2, [19_000, 2]] = -1.0
    assert ops.greedy(logits)[0].tolist() == [0, 8_999, 0]


@pytest.mark.parametrize("place", [0, 4_150])
def test_a_poisoned_row_is_told_from_the_others(place: int) -> None:
    logits = randn(5, 4_200)
    for row, poison in ((0, math.nan), (2, math.inf)):
        logits[row, place] = poison
    logits[4] = -math.inf
    token_ids, largest = ops.greedy(logits)
    assert largest.isfinite().tolist() == [False, True, False, True, False]
    assert torch.equal(token_ids[[1, 3]], logits[[1, 3]].argmax(-1))
    drawn = ops.draw(logits, largest, make_draws(5, top_k=3, top_p=0.9, min_p=0.1))
    assert torch.equal(
        drawn[[1, 3]], sampling.draw(logits, largest, make_draws(5, top_k=3, top_p=0.9, min_p=0.1))[[1, 3]]
    )


FILTERS = [
    {},
    {"temperature": 1e-38},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10**6},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.001, "top_k": 30, "top_p": 0.8},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_keep_what_the_eager_ones_keep(options: dict[str, float]) -> None:
    for vocabulary_size in (1, 123, 4097) if len(options) == 3 else (123,):
        logits = logits_of(3, vocabulary_size)
        logits[0] = logits[0, 0].clone()  # all alike
        logits[1, 5:] = -math.inf  # fewer than some top_k
        draws, largest = make_draws(3, **options), sampling.greedy(logits)[1]
        found = filter_thresholds(logits, largest, draws)
        scaled = (logits[draws.rows] - largest[draws.rows][:, None]) / draws.temperature[:, None]
        expected = filters.filter_thresholds(scaled, draws.min_p, draws.top_k, draws.top_p)
        assert torch.equal(scaled >= found[:, None], scaled >= expected[:, None])
        drawn = ops.draw(logits, largest, draws)
        assert torch.equal(drawn, sampling.draw(logits, largest, draws))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary_size", VOCABULARIES)
def test_draws_are_those_of_the_eager_sampler(vocabulary_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(8, vocabulary_size, dtype)
    largest = sampling.greedy(logits)[1]
    draws = make_draws(8)
    found = ops.draw(logits, largest, draws)
    assert torch.equal(found, sampling.draw(logits, largest, draws))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary_size", VOCABULARIES)
def test_log_probabilities(vocabulary_size: int, dtype: torch.dtype) -> None:
    logits = logits_of(4, vocabulary_size, dtype)
    logits[3] = 1e4 * logits[3].sign().nan_to_num(0.0, 0.0, 0.0)
    token_ids = torch.tensor([0, vocabulary_size - 1, vocabulary_size // 2, 0], device=DEVICE)
    for num_top in (0, min(5, vocabulary_size)):
        ids, logprobs, ranks = ops.log_probabilities(logits, token_ids, num_top)
        eager = eager_log_probabilities.log_probabilities(logits, token_ids, num_top)
        assert torch.equal(ids[:3], eager[0][:3])
        torch.testing.assert_close(logprobs, eager[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(ranks, eager[2])


def test_equally_likely_tokens_are_in_order_and_share_a_rank() -> None:
    logits = torch.zeros(1, 6, device=DEVICE)
    logits[0, [4, 2, 5]] = 1.0
    ids, _, ranks = ops.log_probabilities(logits, torch.tensor([5], device=DEVICE), 3)
    assert ids.tolist() == [[5, 2, 4, 5]]
    assert ranks.tolist() == [1]


def test_no_rows() -> None:
    logits = torch.empty(0, 9, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    token_ids, largest = ops.greedy(logits)
    assert (len(token_ids), len(largest)) == (0, 0)
    assert [tuple(part.shape) for part in ops.log_probabilities(logits, none, 2)] == [(0, 3), (0, 3), (0,)]
