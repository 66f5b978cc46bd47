"""A replay as a trace for ui.perfetto.dev, in Chrome's trace event format.

A worker's lane shows its steps, from the earliest possible begin to the answer. A request's lane shows its states:
queued, prefill, decode, preempted, swapped. Times are microseconds since the recording's start.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from scheduler_service.core import SequenceGroup, SequenceStatus
from scheduler_service.recording.replayer import Moment, Replayer, Session, Step

WORKERS, REQUESTS = 1, 2  # process numbers, by which Perfetto groups lanes


@dataclass(slots=True)
class _Lane:
    """A request's state and its begin."""

    number: int
    since: int
    state: str = "queued"
    worker: str = ""
    has_run: bool = False
    has_token: bool = False  # since a worker was last given the request


class TraceWriter:
    """Writes a trace event by event; `close` completes the file, even of a replay that stopped early."""

    def __init__(self, file: TextIO, replayer: Replayer) -> None:
        self._file = file
        self._replayer = replayer
        self._origin: float | None = None
        self._now = 0
        self._separator = ""
        self._workers: dict[str, int] = {}
        self._lanes: dict[SequenceGroup, _Lane] = {}  # of unfinished requests
        self._num_lanes = 0
        self._on: dict[Session, dict[SequenceGroup, None]] = {}  # groups of each session at its last event
        self._counted: dict[str, object] = {}

    def add(self, moment: Moment) -> None:
        if self._origin is None:
            self._begin(moment.at)
        self._now = max(self._now, self._time(moment.at))
        if moment.kind == "arrival":
            self._open(moment.groups[0])
        if moment.session is not None:
            if moment.kind == "answer" and moment.step is not None:
                self._draw_step(moment.session, moment.step, moment.step.work._asdict())
            elif moment.kind == "session_end" and moment.session.in_flight:
                step = moment.session.in_flight[0]
                step.began_at = max(step.sent_at, moment.session.answered_at)
                self._draw_step(moment.session, step, {"lost": True, **step.work._asdict()})
            self._count(moment.session)
        for gained in moment.gained:
            if gained.token_id is not None and (lane := self._lanes.get(gained.sequence.group)):
                lane.has_token = True
        self._follow(moment)

    def close(self) -> None:
        if self._origin is None:
            self._begin(0.0)
        for lane in self._lanes.values():
            self._end_slice(lane, {})
        self._file.write("\n]}\n")

    # ---- requests

    def _open(self, group: SequenceGroup) -> None:
        self._num_lanes += 1
        self._lanes[group] = _Lane(self._num_lanes, min(self._now, self._time(group.arrived_at)))
        self._name("thread_name", REQUESTS, self._num_lanes, group.request_id)

    def _follow(self, moment: Moment) -> None:
        """Update the lanes that the event may have changed."""
        session, touched = moment.session, dict.fromkeys(moment.groups)
        if session is not None:
            here = dict.fromkeys([*session.scheduler.running, *session.scheduler.swapped])
            touched |= self._on.pop(session, {}) | here
            if here:
                self._on[session] = here
        for group in touched:
            if (lane := self._lanes.get(group)) is None:
                continue
            if group.is_finished:
                ends = sorted({sequence.status.name.lower() for sequence in group.sequences})
                self._end_slice(self._lanes.pop(group), {"ended": ", ".join(ends)})
                continue
            state = self._state(group, lane)
            if state != lane.state:
                self._end_slice(lane, {})
                lane.state = state
            lane.worker = session.worker if session is not None and state not in ("queued", "preempted") else ""

    @staticmethod
    def _state(group: SequenceGroup, lane: _Lane) -> str:
        status = group.live[0].status
        if status is SequenceStatus.WAITING:
            lane.has_token = False
            return "preempted" if lane.has_run else "queued"
        lane.has_run = True
        if status is SequenceStatus.SWAPPED:
            return "swapped"
        if group.beams is not None:  # a beam search has no tokens before its end
            beams = group.live
            lane.has_token = beams[0].num_output_tokens > 0 and all(beam.num_uncomputed_tokens <= 1 for beam in beams)
        return "decode" if lane.has_token else "prefill"

    def _end_slice(self, lane: _Lane, args: dict[str, object]) -> None:
        if lane.worker:
            args["worker"] = lane.worker
        if self._now > lane.since:
            self._slice(REQUESTS, lane.number, lane.state, lane.since, self._now, args)
        lane.since = self._now

    # ---- workers

    def _draw_step(self, session: Session, step: Step, args: dict[str, object]) -> None:
        if session.worker not in self._workers:
            self._workers[session.worker] = len(self._workers) + 1
            self._name("thread_name", WORKERS, self._workers[session.worker], session.worker)
        output = step.output
        args |= {
            "step": output.step_id,
            "session": session.number,
            "sequences": len(output.scheduled),
            "blocks_swapped_out": len(output.blocks_to_swap_out),
            "blocks_swapped_in": len(output.blocks_to_swap_in),
            "blocks_copied": len(output.blocks_to_copy),
            "images_encoded": len(output.items_to_encode),
            "planned_ahead_us": self._time(step.began_at) - self._time(step.sent_at),
        }
        if step.answer is not None and step.answer.HasField("timing"):
            timing = step.answer.timing
            args |= {
                "move_us": timing.move_us,
                "encode_us": timing.encode_us,
                "forward_us": timing.forward_us,
                "sample_us": timing.sample_us,
                "guess_us": timing.guess_us,
            }
        if step.answer is not None and any(step.answer.num_draft_tokens):
            args |= {
                "guesses": sum(step.answer.num_draft_tokens),
                "guesses_right": sum(max(0, number - 1) for number in step.answer.num_tokens),
            }
        parts = [
            name
            for name, count in (("prefill", step.work.prefill_tokens), ("decode", step.work.decode_tokens))
            if count
        ]
        name = " + ".join(parts) or "nothing to compute"
        self._slice(WORKERS, self._workers[session.worker], name, self._time(step.began_at), self._now, args)

    def _count(self, session: Session) -> None:
        scheduler = session.scheduler
        self._counter("waiting", {"requests": len(self._replayer.waiting)})
        self._counter(
            f"{session.worker} requests", {"running": len(scheduler.running), "swapped": len(scheduler.swapped)}
        )
        self._counter(f"{session.worker} free blocks", {"blocks": scheduler.blocks.device.num_free})

    # ---- the trace format

    def _begin(self, origin: float) -> None:
        self._origin = origin
        recorded_at = datetime.fromtimestamp(self._replayer.header.wall_time, UTC).isoformat()
        head = {"displayTimeUnit": "ms", "otherData": {"recorded_at": recorded_at}}
        self._file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        self._name("process_name", WORKERS, 0, "workers")
        self._name("process_name", REQUESTS, 0, "requests")

    def _time(self, at: float) -> int:
        assert self._origin is not None
        return max(0, round((at - self._origin) * 1e6))

    def _name(self, what: str, process: int, lane: int, name: str) -> None:
        self._event(name=what, ph="M", pid=process, tid=lane, args={"name": name})

    def _slice(self, process: int, lane: int, name: str, began: int, ended: int, args: dict[str, object]) -> None:
        began = min(began, ended)
        self._event(name=name, ph="X", pid=process, tid=lane, ts=began, dur=ended - began, args=args)

    def _counter(self, name: str, values: dict[str, object]) -> None:
        if self._counted.get(name) != values:
            self._counted[name] = values
            self._event(name=name, ph="C", pid=WORKERS, tid=0, ts=self._now, args=values)

    def _event(self, **fields: object) -> None:
        self._file.write(self._separator + json.dumps(fields))
        self._separator = ",\n"
