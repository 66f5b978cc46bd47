"""Patches Triton's interpreter on import: products with a fixed order of sums, and less repeated work.

The interpreter uses numpy's matmul. OpenBLAS' AVX2 kernels sum a row in an order that depends on its place and on the
number of rows, so a test of equal bits would test OpenBLAS. Here a product is summed in the order of the inner axis by
elementwise operations, from zero, then added to the accumulator, so that the depth of a kernel's tiles shows in the
bits. 64 x 64 x 64 take 0.2 ms in place of 0.01: 1 % of an interpreted test.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _multiply_in_order() -> None:
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *precision: Any) -> Any:
        if a.data.dtype.kind != "f":  # integers are exact in any order; narrow floats lie in integers
            return multiply(self, a, b, accumulator, *precision)
        left, right = (operand.data.astype(accumulator.data.dtype, copy=False) for operand in (a, b))
        # [inner, rows, columns] in memory too, so that no sum runs over neighbours.
        products = np.multiply(np.moveaxis(left, -1, 0)[..., None], right[:, None, :], order="C")
        return interpreter.TensorHandle(np.add.reduce(products, axis=0) + accumulator.data, accumulator.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _patch_the_language_once_a_launch() -> None:
    """The interpreter does this for every call within a kernel, which takes a third of its time."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (tl, tl.core)
    patched: set[str] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        seen = function.__globals__.values()
        wanted = {module.__name__ for module in modules if any(value is module for value in seen)}
        if wanted <= patched:
            return interpreter._LangPatchScope()
        patched.update(wanted)
        return patch(function)

    def launch_anew(*arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _make_types_once() -> None:
    """The interpreter makes every value's type anew, with a numpy table: a quarter of its time."""
    make, of_numpy = tl.block_type.__init__, interpreter._get_np_dtype
    made: dict[Any, dict[str, Any]] = {}
    of_names: dict[str, Any] = {}

    def make_once(self: Any, element_type: Any, shape: Any) -> None:
        key = element_type.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in made:
            make(self, element_type, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    def find_once(of: Any) -> Any:
        if (found := of_names.get(of.name)) is None:
            found = of_names[of.name] = of_numpy(of)
        return found

    tl.block_type.__init__, interpreter._get_np_dtype = make_once, find_once


_multiply_in_order()
_patch_the_language_once_a_launch()
_make_types_once()
