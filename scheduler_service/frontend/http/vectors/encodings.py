"""Converts vectors to the number types, byte orders and texts that clients ask for. vLLM's clients name the types."""

import base64
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

NumberType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ByteOrder = Literal["native", "big", "little"]
Numbers = npt.NDArray[np.float32]
PIECE_NUMBERS = 3 << 12
"""Numbers that are converted at once, in about 2 ms. Their bytes, in threes, have a base64 text without padding."""


def in_type(vectors: bytes | bytearray, kind: NumberType, order: ByteOrder) -> Iterator[bytes]:
    """Yield little-endian float32 numbers as another type, piece by piece, rounded to the nearest."""
    swaps = order != "native" and order != sys.byteorder
    numbers = np.frombuffer(vectors, "<f4")
    for start in range(0, len(numbers), PIECE_NUMBERS):
        with np.errstate(over="ignore"):  # beyond the range of float16 is infinity
            found = _CONVERSIONS[kind](numbers[start : start + PIECE_NUMBERS])
        yield (found.byteswap() if swaps else found).tobytes()


def in_base64(vectors: bytes | bytearray, kind: NumberType, order: ByteOrder) -> Iterator[bytes]:
    """Yield numbers as the base64 text of their bytes, between quotes."""
    yield b'"'
    yield from map(base64.b64encode, in_type(vectors, kind, order))
    yield b'"'


def as_text(vector: bytes | bytearray) -> bytes:
    """A vector of little-endian float32 as JSON. Nine digits identify every float32."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"[{','.join(map('{:.9g}'.format, numbers))}]".encode()


def _to_bfloat16(numbers: Numbers) -> npt.NDArray[np.uint16]:
    bits = numbers.view("<u4").astype(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@cache
def _float8_values(exponent_bits: int, largest: int) -> Numbers:
    """The values of the positive numbers of 8 bits in the order of their codes, of which `largest` is the last."""
    codes = np.arange(largest + 1)
    mantissa_bits = 7 - exponent_bits
    exponents, mantissas = codes >> mantissa_bits, codes & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    leading = (exponents > 0) + mantissas / (1 << mantissa_bits)  # without an exponent, there is no leading 1
    values: Numbers = np.ldexp(leading, np.maximum(exponents, 1) - bias).astype(np.float32)
    return values


def _to_float8(numbers: Numbers, exponent_bits: int, largest: int) -> npt.NDArray[np.uint8]:
    """Ties go to the even code. Numbers beyond the largest become the largest."""
    values = _float8_values(exponent_bits, largest)
    sizes = np.abs(numbers)
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, sizes)
    middle = (values[codes] + values[np.minimum(codes + 1, largest)]) / 2
    codes += (sizes == middle) & (codes % 2 == 1) & (codes < largest)
    return (codes | np.signbit(numbers).astype(np.int64) << 7).astype(np.uint8)


_CONVERSIONS: dict[NumberType, Callable[[Numbers], npt.NDArray[Any]]] = {
    "float32": lambda numbers: numbers.astype(np.float32),
    "float16": lambda numbers: numbers.astype(np.float16),
    "bfloat16": _to_bfloat16,
    "fp8_e4m3": lambda numbers: _to_float8(numbers, 4, 0x7E),
    "fp8_e5m2": lambda numbers: _to_float8(numbers, 5, 0x7B),
}
