"""Pictures of the docs are what their recordings say, and the same on every run."""

from pathlib import Path

import pytest

from bench.pictures.draw import PICTURES, read, save
from bench.pictures.history import Chunk, History
from bench.pictures.record import FOLDER, SCENES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_its_recording_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    """`python -m bench.pictures.draw` draws them again."""
    assert save(name, tmp_path).read_bytes() == (FOLDER / f"{name}.svg").read_bytes()


def test_every_recording_has_a_scene_that_makes_it() -> None:
    assert {path.stem for path in FOLDER.glob("*.rec")} == set(SCENES)


def test_the_history_of_a_recording_has_the_tables_of_the_core() -> None:
    history: History = read("copy_on_write")
    forked = [step for step in history.steps if len(step.tables) == 4]
    first, last = forked[0].tables, forked[-1].tables
    assert len({tuple(table) for table in first.values()}) == 1  # all share the prompt's blocks
    assert len({tuple(table[:2]) for table in last.values()}) == 1  # the full ones until the end
    assert len({table[2] for table in last.values()}) == 4  # the last one was copied on write
    assert history.steps[0].chunks == [Chunk("request", history.prompts["request"][0], True)]
    assert [one.state for one in history.slices] == ["queued", "prefill", "decode"]


def test_a_request_of_a_killed_worker_continues_on_the_other() -> None:
    history = read("failover")
    (lost_at,) = history.losses
    moved = {one.request_id for one in history.slices if one.worker and one.begin >= lost_at}
    before = {(one.request_id, one.worker) for one in history.slices if one.worker and one.end <= lost_at + 0.001}
    assert len({worker for name, worker in before if name in moved}) == 1
    assert len(moved) >= 2
