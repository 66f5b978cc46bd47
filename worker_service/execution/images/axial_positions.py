"""Positions in three axes (time, row and column) of texts with images (M-RoPE; Wang et al., 2024). An image begins at
the position after the token before it, and the text goes on after the image's longer side."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_service.session.sequence_state import ScheduledChunk


def axial_positions(chunks: Sequence[ScheduledChunk]) -> npt.NDArray[np.int64] | None:
    """[3, num_tokens], chunk after chunk. None if every token has one position, which is its place in the sequence."""
    if not any(_has_grid(chunk) for chunk in chunks):
        return None
    return np.concatenate([_positions(chunk) for chunk in chunks], axis=1)


def _has_grid(chunk: ScheduledChunk) -> bool:
    return any(item.image is not None and item.image.grid is not None for item in chunk.sequence.items)


def _positions(chunk: ScheduledChunk) -> npt.NDArray[np.int64]:
    start, stop = chunk.start, chunk.stop
    found = np.tile(np.arange(start, stop), (3, 1))
    shift = 0  # of a position against the token's place in the sequence, before the item
    for item in chunk.sequence.items:
        if item.start >= stop:
            break
        if item.image is None or item.image.grid is None:
            continue
        rows, columns = item.image.grid
        within = np.arange(max(start, item.start), min(stop, item.stop)) - item.start
        if len(within):
            part = slice(item.start + within[0] - start, item.start + within[-1] + 1 - start)
            found[:, part] = item.start + shift + np.stack((within * 0, within // columns, within % columns))
        change = max(rows, columns) - rows * columns
        found[:, max(item.stop - start, 0) :] += change
        shift += change
    return found
