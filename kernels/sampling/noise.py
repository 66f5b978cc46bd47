"""Counter-based random numbers for sampling, pure functions of (seed, index, position, token).

A sequence gets the same numbers alone, in a batch, after recomputation and on another worker. Wrapping integer
arithmetic has the same bits on every device and in every language:

    mix64(x):   x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    key         = mix64(mix64(mix64(seed + G) + index * G) + position * G),  G = 0x9E3779B97F4A7C15        (64 bits)
    bits        = token * 0x9E3779B1 + low32(key);   bits ^= bits >> 16;  bits *= 0x21F0AAAD                (32 bits)
                  bits ^= bits >> 15;  bits ^= high32(key);  bits *= 0x735A2D97;  bits ^= bits >> 15
    uniform     = ((bits >> 9) + 1/2) * 2**-23            exact in float32, never 0 and never 1
    gumbel      = -log(-log(uniform))                     in (-2.82, 16.64)

Shifts are logical. mix64 is SplitMix64's finaliser (Steele, Lea and Flood, 2014); `bits` is a multiply-xorshift hash
from C. Wellons' hash prospector, in 32 bits to save time over rows and vocabulary.
"""

import torch
from torch import Tensor

_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = 0x9E3779B1


def row_keys(seeds: Tensor, indices: Tensor, positions: Tensor) -> Tensor:
    """The keys of rows of logits. seeds: [rows] int64, the bits of unsigned seeds. indices: [rows] int64, the output's
    number in its request. positions: [rows] int64, the new token's position. Returns [rows] int64."""
    golden = _signed(_GOLDEN64, 64)
    return _mix64(_mix64(_mix64(seeds + golden) + indices * golden) + positions * golden)


def random_bits(keys: Tensor, num_tokens: int) -> Tensor:
    """keys: [rows] int64, from `row_keys`. Returns [rows, num_tokens] int32."""
    low = keys.to(torch.int32)[:, None]  # keeps the lower 32 bits
    high = _shift_right(keys, 32, 64).to(torch.int32)[:, None]
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=keys.device)
    bits = tokens * _signed(_GOLDEN32, 32) + low
    bits = (bits ^ _shift_right(bits, 16, 32)) * _signed(0x21F0AAAD, 32)
    bits = (bits ^ _shift_right(bits, 15, 32) ^ high) * _signed(0x735A2D97, 32)
    return bits ^ _shift_right(bits, 15, 32)


def uniform_noise(keys: Tensor, num_tokens: int) -> Tensor:
    """Uniform in (0, 1). keys: [rows] int64. Returns [rows, num_tokens] float32."""
    return (_shift_right(random_bits(keys, num_tokens), 9, 32).float() + 0.5) * 2.0**-23


def gumbel_noise(keys: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel: `argmax(log p + gumbel)` is a draw from p. Returns [rows, num_tokens] float32."""
    return uniform_noise(keys, num_tokens).log_().neg_().log_().neg_()


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shift_right(x, 31, 64)


def _shift_right(x: Tensor, count: int, width: int) -> Tensor:
    """torch's shift copies the sign bit, which the mask clears."""
    return (x >> count) & ((1 << (width - count)) - 1)


def _signed(constant: int, width: int) -> int:
    """The signed integer with an unsigned constant's bits, because torch has no unsigned arithmetic."""
    return constant - (1 << width) if constant >> (width - 1) else constant
