"""A recording is shown by the same frames as a live engine."""

import asyncio
import copy
import gzip
import json
import re
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from page_states import apply_frame, new_state, state_of
from recorded_workload import record

from scheduler_service.core import PreemptionMode
from scheduler_service.recording import chunks as chunks_module
from scheduler_service.recording.chunks import Chunks
from scheduler_service.recording.frames import RecordedFrames
from scheduler_service.recording.replayer import Replayer


def frames_of(path: Path, chunks: Chunks) -> tuple[RecordedFrames, Replayer]:
    replayer = Replayer()
    frames = RecordedFrames(replayer, chunks)
    for moment in replayer.run(path):
        frames.add(moment)
    frames.close()
    return frames, replayer


def all_chunks(frames: RecordedFrames, chunks: Chunks) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    step = 1
    while step <= frames.num_steps:
        found.append(json.loads(gzip.decompress(chunks.read(step))))
        step = found[-1]["frames"][-1]["step"] + 1
    return found


def test_every_chunk_begins_with_the_state_that_the_chunks_before_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "recording", Random(7), num_workers=3, num_actions=400)
    states, state = {}, new_state()
    monkeypatch.setattr(chunks_module, "STEPS", 10_000)
    with Chunks() as chunks:
        frames, _ = frames_of(tmp_path / "recording", chunks)
        (whole,) = all_chunks(frames, chunks)
        for frame in whole["frames"]:
            apply_frame(state, frame)
            states[frame["step"]] = copy.deepcopy(state)
    monkeypatch.setattr(chunks_module, "STEPS", 16)
    with Chunks(memory_bytes=1000) as chunks:  # beyond, a temporary file
        frames, replayer = frames_of(tmp_path / "recording", chunks)
        found = all_chunks(frames, chunks)
        assert len(found) == chunks.num_chunks > 3
        assert frames.num_steps == replayer.num_steps + 1  # and the end
        steps = [frame["step"] for chunk in found for frame in chunk["frames"]]
        assert steps == [*range(1, frames.num_steps + 1)]
        for chunk in found:
            key_frame, *others = chunk["frames"]
            assert key_frame["snapshot"]
            assert chunk["from"] == key_frame["step"]
            assert not any(frame.get("snapshot") for frame in others)
            assert state_of([key_frame]) == states[chunk["from"]]
            assert state_of(chunk["frames"]) == states[chunk["frames"][-1]["step"]]
            assert all(frame["decisions"] for frame in chunk["frames"])
        assert chunks.read(0) == chunks.read(1)
        assert chunks.read(10**12) == chunks.read(frames.num_steps)


def test_decisions_name_their_reasons(tmp_path: Path) -> None:
    record(tmp_path / "recording", Random(7), mode=PreemptionMode.SWAP, num_workers=2, num_actions=600)
    with Chunks() as chunks:
        frames, _ = frames_of(tmp_path / "recording", chunks)
        said = "\n".join(
            sentence
            for chunk in all_chunks(frames, chunks)
            for frame in chunk["frames"]
            for sentence in (*frame["decisions"], *(event["text"] for event in frame.get("events", ())))
        )
    for words in (
        " is admitted: none of its ",
        " computes tokens 0 to ",
        "one token is computed for each of ",
        " is preempted, and its blocks are swapped to the host: no block was free",
        "(copy on write)",
        " waits: ",
        " lost with ",
    ):
        assert words in said
    chunks_said = re.findall(r" tokens (\d+) to (\d+) of (\d+)", said)
    assert all(int(start) < int(end) <= int(total) for start, end, total in chunks_said)


async def test_the_page_of_a_recording_is_served_until_a_signal(tmp_path: Path) -> None:
    record(tmp_path / "recording", Random(3))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_service.replay", str(tmp_path / "recording"), "--page"),
        *("--http-listen", "127.0.0.1:0"),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = ""
    while " is at " not in said:
        said = (await process.stderr.readline()).decode()
    url = said.partition(" is at ")[2].partition(";")[0]
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/page/info") as answer:
            info = await answer.json()
            assert info["recording"]["name"] == "recording"
        for asked in (1, info["recording"]["num_steps"]):
            async with session.get(f"/page/recording?from={asked}") as answer:
                chunk = await answer.json()
                assert chunk["from"] <= asked <= chunk["frames"][-1]["step"]
        async with session.get("/page/recording?from=minus") as answer:
            assert answer.status == 400
        async with session.get("/") as answer:
            assert answer.status == 200
        async with session.get("/page/feed") as answer:
            assert answer.status == 404
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 0
