"""Replays a recording, and compares each decision of the core with the recorded one. Plans are compared as bytes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from pagewire.v1 import recording_pb2 as pb
from pagewire.v1 import scheduler_output_pb2 as wire
from pagewire.v1 import sequence_group_pb2 as group_pb
from pagewire_common.sampling import MAX_N
from scheduler_service.core import (
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceOutput,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.config import MAX_BLOCKS
from scheduler_service.policies import waiting_queue
from scheduler_service.recording.format import ReadEvent, RecordingError, read_events
from scheduler_service.recording.placements import compare_placements, encode_placements
from scheduler_service.recording.step_work import StepWork
from scheduler_service.recording.words import compare_steps
from scheduler_service.wire.codec import decode_model_output, encode_scheduler_output
from scheduler_service.wire.messages import decode_enum, decode_fields

T = TypeVar("T")

MAX_REPLAYED_BLOCKS = 4 * MAX_BLOCKS
"""Blocks of all workers (1.1 GB of memory), because an untrusted file could ask for more."""


class DifferenceError(Exception):
    """The core decided differently; the message has the place and both decisions."""


@dataclass(slots=True, eq=False)
class Step:
    """A planned step; times in seconds of the recorded clock."""

    output: SchedulerOutput
    work: StepWork
    sent_at: float
    answer: wire.ModelOutput | None = None
    began_at: float = 0.0
    """Time from which the worker could compute the step."""


@dataclass(slots=True, eq=False)
class Session:
    number: int
    worker: str
    epoch: int
    scheduler: Scheduler
    in_flight: deque[Step] = field(default_factory=deque)
    answered_at: float = float("-inf")


class Moment(NamedTuple):
    at: float
    session: Session | None = None
    groups: Sequence[SequenceGroup] = ()
    """Groups that arrived, or ended without a worker's answer."""
    step: Step | None = None
    gained: Sequence[SequenceOutput] = ()
    kind: str = ""
    """The event's field in RecordedEvent."""
    end: int = 0
    """Offset after the event, in bytes."""
    is_loss: bool = False
    """Whether a session ended because its worker was lost."""


class Replayer:
    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.header = pb.RecordingHeader()
        self.num_events = 0
        self.num_steps = 0
        self.num_requests = 0
        self.workers: dict[str, None] = {}
        self._sessions: dict[int, Session] = {}
        self._numbers: dict[object, int] = {}  # of sessions, by scheduler
        self._groups: dict[str, SequenceGroup] = {}  # unfinished

    @property
    def sessions(self) -> Iterable[Session]:
        """The open sessions."""
        return self._sessions.values()

    def run(self, path: Path) -> Iterator[Moment]:
        """Raises DifferenceError at the first difference, and RecordingError for an unusable file."""
        for read in read_events(path):
            moment = self._apply(read)
            self.num_events += 1
            yield moment

    def _apply(self, read: ReadEvent) -> Moment:
        event, kind = read.event, str(read.event.WhichOneof("event"))
        try:
            moment = getattr(self, f"_{kind}")(getattr(event, kind), event.at)
        except _CoreError as error:
            raise DifferenceError(f"event {read.number} at byte {read.offset}, {error}") from error.__cause__
        except (KeyError, IndexError, ValueError) as error:
            raise RecordingError(f"event {read.number} at byte {read.offset} makes no sense: {error!r}") from error
        return moment._replace(kind=kind, end=read.end)  # type: ignore[no-any-return]

    # ---- for each kind of event, a method with the event's name

    def _header(self, header: pb.RecordingHeader, at: float) -> Moment:
        if self.num_events:
            raise ValueError("a second header")
        own = pb.RecordedPolicy.Name(header.policy).removeprefix("RECORDED_POLICY_").lower()
        name = header.policy_name if header.policy == pb.RECORDED_POLICY_UNSPECIFIED else own
        self.waiting = waiting_queue(name, header.overtakes, dict(header.tenant_weights))
        self.header = header
        return Moment(at)

    def _arrival(self, arrival: pb.RecordedArrival, at: float) -> Moment:
        if (number := max(arrival.sampling.n, arrival.sampling.beam_width)) > MAX_N:
            raise ValueError(f"a request has {number} outputs; the most are {MAX_N}")
        group = decode_fields(SequenceGroup, arrival)
        if group.is_finished:
            raise ValueError(f"request {group.request_id!r} had ended when it arrived")
        self.waiting.append(group)
        self._groups[group.request_id] = group
        self.num_requests += 1
        return Moment(at, groups=[group])

    def _withdrawal(self, withdrawal: pb.RecordedWithdrawal, at: float) -> Moment:
        group, status = self._groups[withdrawal.request_id], _status(withdrawal.status)
        if group.request_id not in self.waiting:
            raise _CoreError(f"withdrawal of request {group.request_id!r}: it does not wait")
        self.waiting.withdraw(group, status, withdrawal.index if withdrawal.HasField("index") else None)
        self._forget_if_finished(group)
        return Moment(at, groups=[group])

    def _session_start(self, start: pb.RecordedSessionStart, at: float) -> Moment:
        config = decode_fields(SchedulerConfig, start.config)
        others = (session.scheduler.config for session in self._sessions.values())
        num_blocks = sum(one.num_device_blocks + one.num_host_blocks for one in (config, *others))
        if num_blocks > MAX_REPLAYED_BLOCKS:
            raise ValueError(f"its workers have {num_blocks} blocks; replayed are at most {MAX_REPLAYED_BLOCKS}")
        scheduler = Scheduler(config, self.waiting, start.worker, at)
        session = Session(start.session, start.worker, start.epoch, scheduler)
        if start.session in self._sessions:
            raise ValueError(f"session {start.session} has begun already")
        self._sessions[start.session] = session
        self._numbers[scheduler] = start.session
        self.workers[start.worker] = None
        return Moment(at, session)

    def _session_end(self, end: pb.RecordedSessionEnd, at: float) -> Moment:
        session = self._sessions.pop(end.session)
        del self._numbers[session.scheduler]
        ended = _call(
            session, "the loss of its worker", lambda: session.scheduler.release_all(at, blames=not end.is_blameless)
        )
        self._compare_ids(session, "ends for lost workers", end.ended_request_ids, ended)
        return Moment(at, session, ended or (), is_loss=not end.is_blameless)

    def _admission(self, admission: pb.RecordedAdmission, at: float) -> Moment:
        session = self._sessions[admission.session]
        _call(session, "admission", lambda: session.scheduler.set_admission(admission.admits))
        return Moment(at, session)

    def _adapter(self, adapter: pb.RecordedAdapter, at: float) -> Moment:
        session = self._sessions[adapter.session]
        scheduler, name = session.scheduler, adapter.adapter_id
        match adapter.change:
            case pb.RECORDED_ADAPTER_CHANGE_BEGUN:
                found = scheduler.begin_fetch(*(([name], []) if adapter.is_wanted else ([], [name])))
                if found != (name, adapter.dropped):
                    raise _CoreError(
                        f"worker {session.worker}, an adapter to bring: recorded {(name, adapter.dropped)}; "
                        f"replayed {found and tuple(found)}"
                    )
            case pb.RECORDED_ADAPTER_CHANGE_CAME:
                scheduler.end_fetch(adapter.seconds)
            case pb.RECORDED_ADAPTER_CHANGE_FAILED:
                scheduler.end_fetch(None)
            case pb.RECORDED_ADAPTER_CHANGE_HELD:
                scheduler.hold_adapter(name)
            case pb.RECORDED_ADAPTER_CHANGE_DROPPED:
                scheduler.drop_adapter(name)
            case _:
                raise ValueError("an adapter of which nothing has become")
        return Moment(at, session)

    def _cache_reset(self, reset: pb.RecordedCacheReset, at: float) -> Moment:
        session = self._sessions[reset.session]
        num_blocks = _call(session, "emptying the prefix cache", session.scheduler.reset_prefix_cache)
        if num_blocks != reset.num_blocks:
            raise _CoreError(
                f"worker {session.worker}, blocks in the prefix cache that is emptied: recorded {reset.num_blocks}, "
                f"replayed {num_blocks}"
            )
        return Moment(at, session)

    def _plan(self, plan: pb.RecordedPlan, at: float) -> Moment:
        session = self._sessions[plan.session]
        output = _call(session, "planning", lambda: session.scheduler.schedule(at), plan.raised)
        if output is None:
            return Moment(at, session)
        replayed = None if output.is_empty else encode_scheduler_output(output, session.epoch)
        recorded = plan.step if plan.HasField("step") else None
        if _bytes(recorded) != _bytes(replayed):
            step_id = (recorded or replayed or wire.SchedulerOutput()).step_id
            raise _CoreError(f"worker {session.worker}, step {step_id}: {compare_steps(recorded, replayed)}")
        self._compare_ids(session, "ends as too large", plan.ignored_request_ids, output.ignored)
        if self.header.has_placements:
            choices = pb.RecordedPlan()
            encode_placements(output, choices, self._numbers.__getitem__)
            if difference := compare_placements(plan, choices):
                raise _CoreError(f"worker {session.worker}, {difference}")
        if output.is_empty:
            return Moment(at, session, output.ignored)
        self.num_steps += 1
        step = Step(output, StepWork.of(output), at)
        session.in_flight.append(step)
        return Moment(at, session, output.ignored, step)

    def _answer(self, answer: pb.RecordedAnswer, at: float) -> Moment:
        session = self._sessions[answer.session]
        if not session.in_flight:
            raise ValueError("no step is without an answer")
        decoded, step = decode_model_output(answer.answer), session.in_flight.popleft()
        what = f"the answer to step {step.output.step_id}"
        gained = _call(
            session, what, lambda: session.scheduler.update_from_output(step.output, decoded, at), answer.raised
        )
        if gained is None:
            return Moment(at, session)
        for group in {item.sequence.group.request_id: item.sequence.group for item in gained}.values():
            self._forget_if_finished(group)
        step.answer, step.work = answer.answer, step.work.with_drafts(sum(decoded.num_draft_tokens))
        step.began_at, session.answered_at = max(step.sent_at, session.answered_at), at
        return Moment(at, session, step=step, gained=gained)

    def _finish(self, finish: pb.RecordedFinish, at: float) -> Moment:
        session, status = self._sessions[finish.session], _status(finish.status)
        groups = [self._groups[request_id] for request_id in finish.request_ids]
        request_ids = list(finish.request_ids)
        ended = _call(session, "ending", lambda: session.scheduler.finish_requests(request_ids, status))
        self._compare_ids(session, "ends", request_ids, ended)
        return Moment(at, session, groups)

    def _sequence_finish(self, finish: pb.RecordedSequenceFinish, at: float) -> Moment:
        session, status = self._sessions[finish.session], _status(finish.status)
        group = self._groups[finish.request_id]
        sequence = group.sequences[finish.index]
        if sequence.status.is_finished:
            raise _CoreError(
                f"worker {session.worker}, request {group.request_id!r}, output {finish.index}: it has ended already"
            )
        _call(session, "ending an output", lambda: session.scheduler.finish_sequence(sequence, status))
        self._forget_if_finished(group)
        return Moment(at, session, [group])

    # ---- helpers

    def _compare_ids(
        self, session: Session, what: str, recorded: Sequence[str], replayed: Sequence[SequenceGroup] | None
    ) -> None:
        found = [group.request_id for group in replayed or ()]
        if list(recorded) != found:
            raise _CoreError(
                f"worker {session.worker}, requests that the core {what}: recorded {list(recorded)}, replayed {found}"
            )
        for group in replayed or ():
            self._forget_if_finished(group)

    def _forget_if_finished(self, group: SequenceGroup) -> None:
        if group.is_finished:
            self._groups.pop(group.request_id, None)


class _CoreError(Exception):
    """A difference, without its place in the recording."""


def _call(session: Session, what: str, call: Callable[[], T], recorded: str = "") -> T | None:
    """The result, or None if the core raised the recorded error again."""
    raised, result, cause = "", None, None
    try:
        result = call()
    except Exception as error:
        raised, cause = type(error).__name__, error
    if raised != recorded:
        happened = [name or "nothing" for name in (recorded, raised)]
        reason = f" ({cause})" if cause is not None else ""
        raise _CoreError(
            f"worker {session.worker}, {what}: recorded that the core raised {happened[0]}, "
            f"replayed that it raised {happened[1]}{reason}"
        ) from cause
    return result


def _bytes(step: wire.SchedulerOutput | None) -> bytes:
    return b"" if step is None else step.SerializeToString(deterministic=True)


def _status(number: int) -> SequenceStatus:
    return decode_enum(SequenceStatus, group_pb.SequenceStatus.DESCRIPTOR, number)
