"""The contents of a recording, as the pictures need them: steps with their block tables, and states of requests.

The recording is replayed, so every table is the core's own.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from scheduler_service.core import SchedulerOutput, SequenceGroup
from scheduler_service.recording.perfetto import REQUESTS, TraceWriter
from scheduler_service.recording.replayer import Moment, Replayer, Session


class Chunk(NamedTuple):
    request_id: str
    num_tokens: int
    is_prefill: bool


class Output(NamedTuple):
    """One output of a request."""

    request_id: str
    number: int
    """The output's number in its request, from 0."""


@dataclass(slots=True)
class PlannedStep:
    worker: str
    chunks: list[Chunk]
    tables: dict[Output, list[int]]
    """Device blocks of each running output after the plan."""
    cached: set[int]
    """Free blocks that the prefix cache still finds."""
    num_drafts: int = 0
    """Draft tokens that the worker verified."""
    num_gained: int = 0
    """Tokens that the step's outputs gained."""


class Slice(NamedTuple):
    """A state of a request. Times are seconds since the first request arrived."""

    request_id: str
    state: str
    worker: str
    begin: float
    end: float


class Choice(NamedTuple):
    """A worker took a request."""

    request_id: str
    worker: str
    reason: str
    cached_tokens: int


@dataclass(slots=True)
class History:
    steps: list[PlannedStep] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens of each request's prompt, and how many of them were cached at its first admission."""
    losses: list[float] = field(default_factory=list)
    """Seconds at which sessions with requests ended."""
    num_blocks: int = 0
    """Device blocks of the largest pool."""
    workers: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "History":
        """Raises RecordingError and DifferenceError, as `Replayer.run` does."""
        history, replayer, file = cls(), Replayer(), io.StringIO()
        trace = TraceWriter(file, replayer)
        groups: list[SequenceGroup] = []
        losses: list[float] = []
        planned: dict[int, PlannedStep] = {}  # by the step's identity, until it is answered
        for moment in replayer.run(path):
            trace.add(moment)
            if moment.kind == "arrival":
                groups.append(moment.groups[0])
            if moment.kind == "session_end" and moment.session is not None and moment.session.in_flight:
                losses.append(moment.at)
            history._add(moment, planned)
        trace.close()
        history.workers = list(replayer.workers)
        origin = min((group.arrived_at for group in groups), default=0.0)
        history.losses = [at - origin for at in losses]
        for group in groups:
            history.prompts[unquote(group.request_id)] = (
                len(group.prompt_token_ids),
                group.history.num_cached_tokens or 0,
            )
        history._read_slices(json.loads(file.getvalue()))
        return history

    def _add(self, moment: Moment, planned: dict[int, PlannedStep]) -> None:
        session, step = moment.session, moment.step
        if session is not None and moment.kind == "plan":
            self.num_blocks = max(self.num_blocks, session.scheduler.blocks.device.num_blocks)
            if step is not None:
                planned[id(step)] = found = _planned(session, step.output)
                self.steps.append(found)
                self.choices += (
                    Choice(unquote(p.group.request_id), session.worker, p.reason.name.lower(), p.cached_tokens)
                    for p in step.output.placements
                    if p.to is None
                )
        if step is not None and moment.kind == "answer" and step.answer is not None:
            found = planned.pop(id(step))
            found.num_drafts = sum(step.answer.num_draft_tokens)
            found.num_gained = sum(gained.token_id is not None for gained in moment.gained)

    def _read_slices(self, trace: Mapping[str, Sequence[Mapping[str, object]]]) -> None:
        names: dict[object, str] = {}
        lanes = [event for event in trace["traceEvents"] if event["pid"] == REQUESTS]
        for event in lanes:
            args = event["args"]
            assert isinstance(args, dict)
            if event["name"] == "thread_name":
                names[event["tid"]] = unquote(args["name"])
        first = min((_number(event["ts"]) for event in lanes if event["ph"] == "X"), default=0.0)
        for event in lanes:
            if event["ph"] == "X":
                args, begin = event["args"], (_number(event["ts"]) - first) / 1e6
                assert isinstance(args, dict)
                end = begin + _number(event["dur"]) / 1e6
                self.slices.append(
                    Slice(names[event["tid"]], str(event["name"]), str(args.get("worker", "")), begin, end)
                )


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _planned(session: Session, output: SchedulerOutput) -> PlannedStep:
    scheduler = session.scheduler
    chunks = [
        Chunk(
            unquote(sequence.group.request_id),
            num_tokens,
            sequence.num_computed_tokens <= sequence.num_prompt_tokens
            or num_tokens > 1 + output.num_draft_tokens.get(sequence, 0),
        )
        for sequence, num_tokens, _ in output.scheduled
    ]
    tables = {
        Output(unquote(group.request_id), sequence.index): list(scheduler.blocks.tables[sequence.id])
        for group in scheduler.running
        for sequence in group.live
        if sequence.id in scheduler.blocks.tables
    }
    device = scheduler.blocks.device
    cached = {b for b in range(device.num_blocks) if not device.ref_count(b) and device.key(b) is not None}
    return PlannedStep(session.worker, chunks, tables, cached)
