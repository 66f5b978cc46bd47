"""The frames of a replay, for the page: one a step, with its decisions in words."""

from collections import Counter

from scheduler_service.core import SequenceGroup
from scheduler_service.recording.chunks import Chunks
from scheduler_service.recording.replayer import Moment, Replayer, Session
from scheduler_service.view.decisions import Counts, counts_of, decisions
from scheduler_service.view.observer import Frame, Observer
from scheduler_service.view.workers import WorkerNow


class RecordedFrames:
    """Adds a frame to `chunks` for each planned step, and a last one at the end."""

    def __init__(self, replayer: Replayer, chunks: Chunks) -> None:
        self._replayer, self._chunks = replayer, chunks
        self._observer: Observer | None = None
        self.num_steps = 0
        self.first_at = self.last_at = 0.0
        self._running: dict[Session, dict[SequenceGroup, Counts]] = {}  # after each session's last plan
        self._steps: Counter[str] = Counter()  # by worker, as the other counts
        self._losses: Counter[str] = Counter()
        self._preemptions: Counter[str] = Counter()  # of ended sessions
        self._tokens: Counter[str] = Counter()
        self._admitted: set[SequenceGroup] = set()  # unfinished

    def add(self, moment: Moment) -> None:
        if self._observer is None:
            self.first_at, self._observer = moment.at, Observer(moment.at)
        self.last_at = max(self.last_at, moment.at)
        session, step = moment.session, moment.step
        self._tokens["output_tokens"] += sum(item.token_id is not None for item in moment.gained)
        self._admitted.difference_update(
            [item.sequence.group for item in moment.gained if item.sequence.group.is_finished],
            [group for group in moment.groups if group.is_finished],
        )
        if session is None:
            return
        if moment.kind == "session_end":
            self._losses[session.worker] += moment.is_loss
            self._preemptions[session.worker] += sum(session.scheduler.num_preemptions.values())
            self._running.pop(session, None)
        elif moment.kind == "answer":
            self._steps[session.worker] += 1
        elif moment.kind == "plan" and step is not None:
            for placement in step.output.placements:
                if placement.to is None:
                    self._count(placement.group)
            schedulers = [one.scheduler for one in self._replayer.sessions]
            before = self._running.get(session, {})
            found = decisions(session.scheduler, step.output, before, schedulers)
            self._running[session] = {group: counts_of(group) for group in session.scheduler.running}
            if len(schedulers) > 1:
                found.insert(0, f"step {step.output.step_id} of worker {session.worker}")
            self._look(moment.at, found)

    def close(self) -> None:
        """Add the end of the recording as a last step."""
        if self._observer is not None:
            self._look(self.last_at, ["the recording ends here"])
            self._observer.close()
        self._chunks.finish()

    def _count(self, group: SequenceGroup) -> None:
        """Count the prompt of a group that is admitted for the first time."""
        if group not in self._admitted and not group.history.num_recomputes:
            self._admitted.add(group)
            self._tokens["prompt_tokens"] += group.num_prompt_tokens
            self._tokens["cached_tokens"] += min(group.history.num_cached_tokens or 0, group.num_prompt_tokens)

    def _look(self, at: float, found: list[str]) -> None:
        assert self._observer is not None
        workers = self._workers()
        counts = {name: self._tokens[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
        counts["preemptions"] = sum(one.preemptions for one in workers)
        counts["losses"] = self._losses.total()
        frame: Frame = self._observer.look(at, workers, self._replayer.waiting, counts)
        self.num_steps += 1
        if self._chunks.wants_key_frame:
            happened = {name: frame[name] for name in ("events", "ended") if name in frame}
            frame = self._observer.snapshot() | happened
        self._chunks.add(self.num_steps, frame | {"step": self.num_steps, "decisions": found})

    def _workers(self) -> list[WorkerNow]:
        open_sessions = {session.worker: session for session in self._replayer.sessions}
        return [self._worker(worker, open_sessions.get(worker)) for worker in self._replayer.workers]

    def _worker(self, worker: str, session: Session | None) -> WorkerNow:
        scheduler = None if session is None else session.scheduler
        now = WorkerNow(
            worker,
            "connecting",
            scheduler,
            steps=self._steps[worker],
            losses=self._losses[worker],
            preemptions=self._preemptions[worker],
        )
        if session is not None:
            now.draining = not session.scheduler.admits
            now.state = "draining" if now.draining else "serving"
            now.epoch = session.epoch
            now.preemptions += sum(session.scheduler.num_preemptions.values())
        return now
