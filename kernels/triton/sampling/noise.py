"""The counter-based random numbers of `kernels.sampling.noise`, for use inside a Triton kernel. The numbers have the
same bits as in eager torch.

The random numbers are not stored in memory. Each number is computed where it is used, in 32-bit integer arithmetic.
"""

import triton
import triton.language as tl


@triton.jit
def random_bits(key, token):
    """Compute 32 random bits for each token id. key: an int64 scalar, the row's key. token: int32 token ids, in any
    shape. Returns uint32."""
    low = key.to(tl.uint32)  # the conversion keeps the lower 32 bits
    high = (key.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    bits = token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) + low
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x21F0AAAD, tl.uint32)
    bits = (bits ^ (bits >> 15) ^ high) * tl.full([], 0x735A2D97, tl.uint32)
    return bits ^ (bits >> 15)


@triton.jit
def gumbel_noise(key, token):
    """Compute random numbers of the standard Gumbel distribution for token ids, in float32."""
    uniform = ((random_bits(key, token) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))
