"""The bar that shows how far loading has come; nothing where stderr is not a terminal, so that logs stay logs."""

from typing import Never

from tqdm import tqdm


def byte_progress(what: str, num_bytes: int | None = None) -> "tqdm[Never]":
    """A bar over `num_bytes`, to be used as a context and told of bytes by its `update`, and of all by `reset`."""
    return tqdm(desc=what, total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=None)


def count_progress(what: str, count: int) -> "tqdm[Never]":
    """A bar over `count` items."""
    return tqdm(desc=what, total=count, disable=None)
