"""`kernels.sampling.noise` inside Triton kernels, with the same bits, computed where used and never stored."""

import triton
import triton.language as tl


@triton.jit
def random_bits(key, token):
    """key: int64 scalar, the row's key. token: int32 ids of any shape. Returns uint32."""
    low = key.to(tl.uint32)  # keeps the lower 32 bits
    high = (key.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    bits = token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) + low
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x21F0AAAD, tl.uint32)
    bits = (bits ^ (bits >> 15) ^ high) * tl.full([], 0x735A2D97, tl.uint32)
    return bits ^ (bits >> 15)


@triton.jit
def gumbel_noise(key, token):
    """Standard Gumbel numbers in float32."""
    uniform = ((random_bits(key, token) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))
