"""The operations of `kernels.cpu.ops` with sums of a row that are the same to the bit whatever else a step computes.

All but some products are so already: a library multiplies in float32 and float16, and in bf16 where a weight cannot be
packed.
"""

from typing import Any

from kernels.cpu import ops
from kernels.cpu.ops import pack_alike as pack

__all__ = ["pack"]


def __getattr__(name: str) -> Any:
    return getattr(ops, name)
