"""Positions in three axes (time, row and column) of texts with images (M-RoPE; Wang et al., 2024). An image begins at
the position after the token before it, and the text goes on after the image's longer side."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from worker_service.session.sequence_state import STOP, ScheduledChunk, SequenceState


def axial_positions(chunks: Sequence[ScheduledChunk]) -> npt.NDArray[np.int64] | None:
    """[3, num_tokens], chunk after chunk. None if every token has one position, which is its place in the sequence.

    The items before a chunk cost no time: 256 decoding sequences of 256 images each take 5 ms.
    """
    if not any(_has_grid(chunk) for chunk in chunks):
        return None
    return np.concatenate([_positions(chunk) for chunk in chunks], axis=1)


def shifts(places: Iterable[tuple[SequenceState, int]]) -> list[int]:
    """The difference between a token's position, which is equal in all axes, and its place in the sequence. places:
    sequences and places of tokens outside of images."""
    found = ((sequence.items, bisect_right(sequence.items, place, key=STOP)) for sequence, place in places)
    return [items[first - 1].shift if first else 0 for items, first in found]


def _has_grid(chunk: ScheduledChunk) -> bool:
    """All images of a model have grids, or none has."""
    image = next((item.image for item in chunk.sequence.items if item.image is not None), None)
    return image is not None and image.grid is not None


def _positions(chunk: ScheduledChunk) -> npt.NDArray[np.int64]:
    items, start, stop = chunk.sequence.items, chunk.start, chunk.stop
    first = bisect_right(items, start, key=STOP)
    shift = items[first - 1].shift if first else 0  # of the tokens before the item
    found = np.tile(np.arange(start, stop) + shift, (3, 1))
    for item, begin, end in chunk.parts_of_items():
        if item.image is not None and item.image.grid is not None:
            columns, within = item.image.grid[1], np.arange(begin, end) - item.start
            axes = np.stack((within * 0, within // columns, within % columns))
            found[:, begin - start : end - start] = item.start + shift + axes
        found[:, end - start :] += item.shift - shift
        shift = item.shift
    return found
