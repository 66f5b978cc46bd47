"""The trace that a replay draws: a lane for each worker and each request, as the viewer expects them."""

import io
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_workload import Clock, Connection, MemorySink, Worker, record

from pagewire.v1 import scheduler_output_pb2 as wire
from scheduler_service.core import (
    PreemptionMode,
    SamplingParams,
    SchedulerConfig,
    SequenceGroup,
    WaitingQueue,
)
from scheduler_service.recording.format import read_events
from scheduler_service.recording.perfetto import REQUESTS, WORKERS, TraceWriter
from scheduler_service.recording.recorder import Recorder
from scheduler_service.recording.replayer import Replayer
from scheduler_service.wire.codec import decode_model_output

Event = dict[str, Any]
STATES = {"queued", "prefill", "decode", "preempted", "swapped"}


def draw(path: Path) -> dict[str, Any]:
    file, replayer = io.StringIO(), Replayer()
    trace = TraceWriter(file, replayer)
    for moment in replayer.run(path):
        trace.add(moment)
    trace.close()
    return dict(json.loads(file.getvalue()))


def lanes(trace: dict[str, Any], process: int) -> dict[str, list[Event]]:
    """Slices of each lane of a process, by the lane's name."""
    names: dict[int, str] = {}
    slices: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["pid"] == process and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        if event["pid"] == process and event["ph"] == "X":
            slices[event["tid"]].append(event)
    assert set(slices) <= set(names), "a lane without a name"
    return {name: slices[number] for number, name in names.items()}


def check_shape(trace: dict[str, Any]) -> None:
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
        assert event["ph"] in "XMC"
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())


def lifetimes(path: Path) -> dict[str, tuple[int, int]]:
    """When each request arrived and ended, in microseconds after the recording began."""
    times: dict[str, tuple[int, int]] = {}
    alive: dict[SequenceGroup, None] = {}
    for moment in Replayer().run(path):
        if moment.kind == "header":
            origin = moment.at
        if moment.kind == "arrival":
            alive[moment.groups[0]] = None
        for group in [group for group in alive if group.is_finished]:
            del alive[group]
            times[group.request_id] = (round((group.arrived_at - origin) * 1e6), round((moment.at - origin) * 1e6))
    assert not alive
    return times


@settings(max_examples=10)
@given(st.integers(0, 1 << 32))
def test_a_requests_lane_says_where_it_was_from_arrival_to_end(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    random, path = Random(seed), tmp_path_factory.mktemp("perfetto") / "recording"
    policy, mode = random.choice(["fcfs", "priority", "fair"]), random.choice(list(PreemptionMode))
    record(path, random, policy=policy, mode=mode, num_actions=300)
    trace = draw(path)
    check_shape(trace)
    requests, times = lanes(trace, REQUESTS), lifetimes(path)
    assert set(requests) == set(times)
    for name, slices in requests.items():
        assert {piece["name"] for piece in slices} <= STATES
        assert slices[0]["name"] == "queued"
        assert slices[0]["ts"] == times[name][0]
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] == after["ts"]
            assert before["name"] != after["name"]
        assert slices[-1]["ts"] + slices[-1]["dur"] == times[name][1]
        assert "ended" in slices[-1]["args"]


@settings(max_examples=10)
@given(st.integers(0, 1 << 32))
def test_a_workers_steps_follow_one_another_and_none_is_missing(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    path = tmp_path_factory.mktemp("perfetto") / "recording"
    record(path, Random(seed), num_workers=2, most_in_flight=3, num_actions=300)
    trace = draw(path)
    num_answers = sum(
        read.event.WhichOneof("event") == "answer" and not read.event.answer.raised for read in read_events(path)
    )
    steps = lanes(trace, WORKERS)
    assert set(steps) <= {"worker:0", "worker:1"}
    for slices in steps.values():
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"]
    drawn = [piece for slices in steps.values() for piece in slices if "lost" not in piece["args"]]
    assert len(drawn) == num_answers


class Recorded:
    """A worker of this size, whose requests and answers are recorded."""

    def __init__(self, path: Path, **sizes: Any) -> None:
        self.path, self._sink, self.clock = path, MemorySink(), Clock()
        self._recorder = Recorder(self._sink, policy="fcfs", overtakes=1, tenant_weights={}, clock=self.clock)
        self._waiting, self._connection = WaitingQueue(), Connection(1)
        config = SchedulerConfig(**{"block_size": 4, "max_num_seqs": 2, "max_model_len": 64} | sizes)
        self.worker = Worker(
            self._recorder.scheduler(config, self._waiting, "here:1", self._connection), self._connection
        )

    def add(self, name: str, prompt: list[int], **sampling: Any) -> None:
        group = SequenceGroup(name, prompt, SamplingParams(**sampling), arrived_at=self.clock())
        self._waiting.append(group)
        self._recorder.arrived(group)

    def step(self, **answer: Any) -> None:
        """Plan a step and take this answer in; a token of each sequence that samples, unless it says otherwise."""
        output = self.worker.plan(self.clock())
        given = {"step_id": output.step_id, "token_ids": [1] * output.num_samples} | answer
        self._connection.last_answer = wire.ModelOutput(**given)
        answered = decode_model_output(self._connection.last_answer)
        self.worker.scheduler.update_from_output(self.worker.in_flight.popleft(), answered, self.clock())

    def draw(self) -> dict[str, Any]:
        self.path.write_bytes(self._sink.data)
        return draw(self.path)


def test_a_beam_search_decodes_as_soon_as_it_has_beams(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "recording", num_device_blocks=16, max_num_batched_tokens=4)
    recorded.add("search", [7] * 7, max_tokens=4, beam_width=2)
    while not recorded.worker.plan(recorded.clock()).is_empty:
        recorded.worker.answer(Random(0), recorded.clock())
    (slices,) = lanes(recorded.draw(), REQUESTS).values()
    assert [piece["name"] for piece in slices] == ["queued", "prefill", "decode"]
    assert slices[2]["dur"] > slices[1]["dur"]


def test_a_swapped_request_and_its_steps_are_drawn_as_they_were(tmp_path: Path) -> None:
    """Two requests outgrow a pool of 4 blocks; the later one is swapped out until the other has ended.

    It has two blocks, and the other request takes one of them: its prompt's first block is still there at its return.
    """
    recorded = Recorded(
        tmp_path / "recording",
        num_device_blocks=4,
        num_host_blocks=4,
        max_num_batched_tokens=32,
        watermark=0.0,
        preemption_mode=PreemptionMode.SWAP,
    )
    for name in ("older", "younger"):
        recorded.add(name, [len(name)] * 8, max_tokens=3)
    while recorded.worker.scheduler.has_work:
        recorded.step(timing=wire.StepTiming(forward_us=5))
    trace = recorded.draw()
    requests = lanes(trace, REQUESTS)
    assert [piece["name"] for piece in requests["older"]] == ["queued", "prefill", "decode"]
    assert [piece["name"] for piece in requests["younger"]] == ["queued", "prefill", "decode", "swapped", "decode"]
    assert requests["younger"][1]["args"] == {"worker": "here:1"}
    (steps,) = lanes(trace, WORKERS).values()
    assert [step["name"] for step in steps[:2]] == ["prefill", "decode"]
    assert steps[0]["args"]["prefill_tokens"] == 16
    assert steps[0]["args"]["forward_us"] == 5
    assert [step["args"]["blocks_swapped_out"] for step in steps[:3]] == [0, 2, 0]
    assert sum(step["args"]["blocks_swapped_in"] for step in steps) == 1
    counters = [event for event in trace["traceEvents"] if event["name"] == "here:1 requests"]
    assert {"running": 1, "swapped": 1} in [event["args"] for event in counters]


def test_a_step_shows_its_guesses_and_those_that_were_right(tmp_path: Path) -> None:
    recorded = Recorded(
        tmp_path / "recording", num_device_blocks=8, max_num_batched_tokens=16, max_model_len=24, num_lookahead_slots=3
    )
    recorded.add("one", [5] * 6, max_tokens=6)
    for verified, gained in ((0, 1), (2, 2), (1, 2)):
        recorded.step(
            token_ids=[1] * gained, num_tokens=[gained], num_draft_tokens=[verified], num_draft_tokens_wanted=[3]
        )
    (steps,) = lanes(recorded.draw(), WORKERS).values()
    assert [(step["args"].get("guesses"), step["args"].get("guesses_right")) for step in steps] == [
        (None, None),
        (2, 1),
        (1, 1),
    ]


def test_a_recording_that_stops_in_the_middle_draws_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, Random(4))
    reads = list(read_events(path))
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[: reads[len(reads) // 3].end + 1])
    command = [sys.executable, "-m", "scheduler_service.replay", str(cut), "--perfetto", str(tmp_path / "trace.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_shape(trace)
    last = max(piece["ts"] + piece["dur"] for slices in lanes(trace, REQUESTS).values() for piece in slices)
    assert all(
        "ended" in slices[-1]["args"] or slices[-1]["ts"] + slices[-1]["dur"] == last
        for slices in lanes(trace, REQUESTS).values()
        if slices
    )


def test_a_trace_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    record(tmp_path / "recording", Random(4))
    out = tmp_path / "nowhere" / "trace.json"
    command = [sys.executable, "-m", "scheduler_service.replay", str(tmp_path / "recording"), "--perfetto", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"{out}: No such file or directory" in result.stderr
