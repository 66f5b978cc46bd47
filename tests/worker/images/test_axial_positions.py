"""Positions in three axes are those of a walk over the whole prompt, and items before a chunk cost nothing."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_helpers import state

from worker_service.execution.images.axial_positions import axial_positions
from worker_service.session.items import ImagePart, PromptItem
from worker_service.session.sequence_state import ScheduledChunk

Grid = tuple[int, int]


class Items(tuple[PromptItem, ...]):
    """Counts the items that are looked at."""

    num_reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        self.num_reads += 1
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[PromptItem]:
        for item in super().__iter__():
            self.num_reads += 1
            yield item


def prompt(parts: list[int | Grid]) -> tuple[Items, list[tuple[int, int, int]]]:
    """The items of a prompt, and the position of each token. A number is tokens without an image."""
    items: list[PromptItem] = []
    positions: list[tuple[int, int, int]] = []
    after = shift = 0
    for part in parts:
        if isinstance(part, int):
            positions += [(after + n,) * 3 for n in range(part)]
            after += part
            continue
        rows, columns = part
        image, start = ImagePart(0, 8, 8, part), len(positions)
        positions += [(after, after + row, after + column) for row in range(rows) for column in range(columns)]
        after += max(part)
        shift += image.shift
        items.append(PromptItem(b"", start, len(positions), image=image, shift=shift))
    return Items(items), positions


def chunk(items: Items, start: int, stop: int) -> ScheduledChunk:
    return ScheduledChunk(replace(state([0] * stop), items=items), start, stop, samples=False)


@given(st.lists(st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=5), st.data())
def test_a_chunk_has_the_positions_of_the_whole_prompt(parts: list[int | Grid], data: st.DataObject) -> None:
    items, positions = prompt([*parts, (2, 3), 4])
    start = data.draw(st.integers(0, len(positions) - 1))
    stop = data.draw(st.integers(start + 1, len(positions)))
    found = axial_positions([chunk(items, start, stop)])
    assert found is not None
    assert found.T.tolist() == [list(position) for position in positions[start:stop]]


def test_the_images_before_a_chunk_are_not_walked() -> None:
    items, positions = prompt([(2, 2), 6] * 256)
    found = axial_positions([chunk(items, len(positions) - 1, len(positions))])
    assert np.array_equal(found, [[positions[-1][0]]] * 3)
    assert items.num_reads < 40


@pytest.mark.parametrize("items", [(), (PromptItem(b"", 0, 2),)], ids=["text", "embeddings"])
def test_a_text_without_images_has_one_axis(items: tuple[PromptItem, ...]) -> None:
    assert axial_positions([chunk(Items(items), 0, 3)]) is None
