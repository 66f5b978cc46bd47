"""The groups that one worker's session has been given, and everything that can happen to them but planning.

A group is running or swapped here, or it waits in the queue that is shared. The ledger takes the worker's answers in,
ends sequences and requests, and gives everything back when the worker is lost. Whatever ends a sequence, its blocks are
free afterwards.
"""

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.manager import AllocStatus, BlockManager
from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from scheduler_service.core.groups.beam_search import Continuation
from scheduler_service.core.groups.sampling_params import NOTHING_ALLOWED
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.outputs import ModelOutput, ScheduledSequence, SchedulerOutput, SequenceOutput
from scheduler_service.core.queues.waiting_queue import WaitingQueue
from scheduler_service.core.suspects.suspicion import Suspicion

# A worker that has not answered a step after MOST_OVERDUE times what it should take, and after OVERDUE_SECONDS, has
# failed by then: however much later it counts as lost, it did not serve in that time.
MOST_OVERDUE = 4
OVERDUE_SECONDS = 1.0


class GroupLedger:
    """Running and swapped groups, block tables, and what the worker has yet to be told of their ends."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, worker: str = "", now: float = 0.0) -> None:
        self.config = config
        self.worker = worker  # its name: the same one in every session
        self.waiting = waiting
        self.balancer = waiting.balancer
        self.admits = True  # whether waiting groups may be given to the worker
        self.running: dict[SequenceGroup, None] = {}  # in the order of admission
        self.num_running_seqs = 0  # of the running groups together, counted as budgets count them
        self._max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self.running_loras: Counter[str] = Counter()  # adapters, and how many running groups need each
        self.swapped: OrderedDict[SequenceGroup, None] = OrderedDict()  # first to resume first
        self.answered_at = float("-inf")  # when the last answer came
        self._in_flight: deque[SchedulerOutput] = deque()  # steps without an answer, in order
        self.member = self.balancer.join(self)
        try:
            self.blocks = BlockManager(
                config.block_size,
                config.num_device_blocks,
                config.num_host_blocks,
                config.watermark,
                prefix_caching=config.prefix_caching and not config.sliding_window,
                num_lookahead_slots=config.num_lookahead_slots,
                sliding_window=config.sliding_window,
                max_blocks_per_sequence=config.max_blocks_per_sequence,
                max_sequence_tokens=config.max_sequence_tokens,
                directory=self.balancer.directory,
                bit=self.member.bit,
            )
        except BaseException:  # as MemoryError
            self.balancer.leave(self.member)
            raise
        self.num_preemptions = {PreemptionMode.RECOMPUTE: 0, PreemptionMode.SWAP: 0}
        self._by_id: dict[str, SequenceGroup] = {}  # running and swapped ones
        self._finished: list[Sequence] = []  # to tell the worker
        self._preempted: list[int] = []
        self._sequence_ids = itertools.count(1)
        self._prompt_seconds = 0.0  # how long the last step of nothing but prompts took
        # The plan in which everybody computes one token; who has ended since it was made may still stand in it.
        self._steady: list[ScheduledSequence] | None = None
        self._suspect: SequenceGroup | None = None
        self._accused: dict[SequenceGroup, None] = {}  # running groups that a worker was lost with
        self.balancer.background.join(now)

    def add_request(self, group: SequenceGroup) -> None:
        """Queue a request; raises ValueError while one of its id waits, or is with any worker that shares the queue."""
        self.waiting.append(group)

    def room_for(self, group: SequenceGroup) -> int | None:
        """Cached tokens that a waiting group would find here, if the next step could take it; else None."""
        is_open = self.admits and not self.swapped and not self._runs_suspect
        if not is_open or group.num_seqs > self.config.max_num_seqs - self.member.num_seqs:
            return None
        if not self.has_lora_slot(group):
            return None
        if self.blocks.can_allocate(group, leave_watermark=bool(self.running)) is not AllocStatus.OK:
            return None
        return self.blocks.num_cached_tokens(group.live[0])

    def has_lora_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the group's adapter can join those of the running groups, `without` those that would make room."""
        if not group.lora_name or group.lora_name in self.running_loras:
            return True
        leaving = Counter(other.lora_name for other in without)
        return sum(count > leaving[name] for name, count in self.running_loras.items()) < self.config.max_loras

    @property
    def _runs_suspect(self) -> bool:
        return self._suspect is not None and self._suspect in self.running and self._suspect.is_suspect

    def get_request_counts(self) -> tuple[int, int, int]:
        """How many requests run here, how many wait, and how many are swapped out here: a group counts once.

        vLLM's `get_request_counts` returns two numbers, of requests that run and that wait for its one engine. Here the
        second is of the queue that all workers share, so it must not be added up over workers. A preempted request
        counts as waiting after recompute, as there, and as swapped out after a swap, which vLLM does not know. A
        request that has ended counts nowhere, even if the worker has yet to be told.
        """
        return len(self.running), len(self.waiting), len(self.swapped)

    @property
    def steps_in_flight(self) -> SequenceOf[SchedulerOutput]:
        """Those without an answer, the oldest first."""
        return self._in_flight

    @property
    def has_work(self) -> bool:
        """Whether `schedule` might return something other than an empty step."""
        waiting = self.admits and self.waiting
        return bool(self.running or self.swapped or waiting or self._finished or self._preempted)

    def set_admission(self, admits: bool) -> None:
        """Admit waiting groups from now on, or none while the worker is drained; those that it has go on either way."""
        self.admits = admits
        self._report(self.member.backlog, self.member.num_seqs)

    def _report(self, backlog: int, num_seqs: int) -> None:
        """Tell the balancer what there is to do here."""
        self.balancer.report(self.member, backlog, num_seqs, is_open=self.admits and not self.swapped)

    def release_all(self, now: float = 0.0, *, blames: bool = True) -> list[SequenceGroup]:
        """The worker is gone: give all its groups back to the head of the queue. Plan no further steps.

        If steps were in flight, it `blames` those in them: any may be what it was lost to, also one of the second step
        where the answer to the first was lost with it, or one that was preempted since. Only those that have ended or
        are with another worker by now are left out. Nothing is blamed when the session ended for reasons of its own. No
        group is ended for what a single worker does while there are others. Returns the group that was ended for the
        loss, in a list, or none.
        """
        in_flight = self._in_flight_at(now)
        self.balancer.background.leave(self._began_at + in_flight if self._in_flight else now, is_lost=blames)
        in_step = dict.fromkeys(group for output in (self._in_flight if blames else ()) for group in _groups_in(output))
        ended: list[SequenceGroup] = []
        is_only = not self.balancer.other_workers(self.member)
        for group in in_step:
            if self._find(group.request_id) is not group:
                continue
            suspicion = group.suspicion = group.suspicion or Suspicion()
            is_blamed = suspicion.lose(self.balancer.background, self.worker, in_flight, now, alone=len(in_step) == 1)
            if is_blamed and (is_only or len(suspicion.lost_on) > 1):
                group.error = (
                    f"{suspicion.num_losses} workers failed in a row while computing this request, which is more than "
                    "coincidence explains"
                )
                for sequence in group.live:
                    self.finish_sequence(sequence, SequenceStatus.FINISHED_ABORTED)
                ended.append(group)
        groups = [*self.running, *self.swapped]
        for group in groups:
            self._release(group)
        self.waiting.put_back(groups)
        self.num_preemptions[PreemptionMode.RECOMPUTE] += len(groups)
        for group in groups:
            group.num_recomputes += 1
        self.blocks.device.withdraw_all()
        self.balancer.leave(self.member)
        return ended

    @property
    def _began_at(self) -> float:
        """When the worker could begin with the oldest step in flight: it was there, and the one before was answered."""
        return max(self._in_flight[0].planned_at, self.answered_at)

    def _in_flight_at(self, now: float) -> float:
        """For how many seconds a worker that is lost now may have worked on steps: see MOST_OVERDUE."""
        if not self._in_flight:
            return 0.0
        expected = self.balancer.times.seconds(sum(output.num_tokens for output in self._in_flight))
        most = max(OVERDUE_SECONDS, MOST_OVERDUE * expected * 1000 / self.member.speed)
        return min(max(0.0, now - self._began_at), most)

    def _release(self, group: SequenceGroup) -> None:
        """Take a group off the worker: it will be new there when it comes back."""
        self._steady = None
        self._forget(group)
        for output in self._in_flight:
            output.dropped.update(group.live)
        for sequence in group.live:
            self.blocks.free(sequence)
            sequence.id = 0
            sequence.status = SequenceStatus.WAITING
            sequence.num_computed_tokens = 0
            sequence.num_stored_tokens = 0
            sequence.is_known = False
            sequence.forked_from = None
            sequence.candidates = None
            sequence.draft_token_ids = []
            sequence.num_draft_tokens = 0
            sequence.num_known_blocks = 0
            sequence.num_published_blocks = 0
        group.has_unforked = len(group.sequences) > 1

    def _forget(self, group: SequenceGroup) -> None:
        if group in self.running:
            self._stop_running(group)
        self.swapped.pop(group, None)
        del self._by_id[group.request_id]

    def _start_running(self, group: SequenceGroup) -> None:
        self.running[group] = None
        self.num_running_seqs += group.num_seqs
        if group.lora_name:
            self.running_loras[group.lora_name] += 1
        if group.suspicion is not None:
            self._accused[group] = None

    def _stop_running(self, group: SequenceGroup) -> None:
        del self.running[group]
        self._accused.pop(group, None)
        if self._suspect is group:
            self._suspect = None
        self.num_running_seqs -= group.num_seqs
        if group.lora_name:
            self.running_loras[group.lora_name] -= 1
            if not self.running_loras[group.lora_name]:
                del self.running_loras[group.lora_name]

    # ---- taking the answer in

    def update_from_output(
        self, output: SchedulerOutput, answer: ModelOutput, now: float = 0.0
    ) -> list[SequenceOutput]:
        """Account for a step's computed tokens and append the sampled ones.

        Returns what each sequence gained, in the order of the step; a sequence that thereby ended has its final
        status. Sequences that were finished or preempted by recompute after the step was sent gain nothing. Answers
        come in the order of steps. Raises ValueError when the answer is not to this step.
        """
        if not self._in_flight or self._in_flight[0] is not output:
            raise ValueError(f"step {output.step_id} is not the oldest without an answer")
        if answer.step_id != output.step_id:
            raise ValueError(f"the worker answered step {answer.step_id} instead of step {output.step_id}")
        if len(answer.num_tokens or answer.token_ids) != output.num_samples:
            raise ValueError(f"the worker returned {len(answer.token_ids)} tokens for {output.num_samples} samples")
        seconds = now - self._began_at
        self._in_flight.popleft()
        self.balancer.stepped(self.member, output.num_tokens, seconds)
        if self._accused:
            in_step = _groups_in(output)
            for group in [group for group in self._accused if group in in_step]:
                assert group.suspicion is not None
                group.suspicion.run(max(0.0, seconds), alone=len(in_step) == 1)
        self.answered_at = now
        if output.prompts_began is not None:
            self._prompt_seconds = now - output.prompts_began
        searches: dict[SequenceGroup, None] = {}
        gained: list[SequenceOutput] = []
        sampled = iter(self._accept_drafts(output, answer, gained) if output.draft_tokens else answer.token_ids)
        block_size, dropped, failed = self.config.block_size, output.dropped, answer.failed_sequence_ids
        reports = bool(answer.logprobs or answer.prompt_logprobs)
        for sequence, num_tokens, samples in output.scheduled:
            token_id = next(sampled) if samples else None
            status = sequence.status
            if (status is not SequenceStatus.RUNNING and status.is_finished) or (dropped and sequence in dropped):
                continue
            start = sequence.num_stored_tokens + 1
            sequence.num_stored_tokens += num_tokens
            if num_tokens > 1 or sequence.num_stored_tokens % block_size == 0:
                self.blocks.publish(sequence)
            if failed and sequence.id in failed:
                self.blocks.withdraw(sequence)
                if sequence.sampling.allows_some(sequence.token_ids, sequence.num_output_tokens):
                    sequence.group.error = "no token could be chosen: the model's output was not finite"
                    self.finish_sequence(sequence, SequenceStatus.FINISHED_ABORTED)
                else:
                    sequence.group.error = NOTHING_ALLOWED
                    self.finish_sequence(sequence, SequenceStatus.FINISHED_IGNORED)
                token_id = None
            elif token_id is not None and sequence.group.beams is not None:
                sequence.candidates = _candidates(sequence, answer)
                searches[sequence.group] = None
                continue
            elif token_id is not None:
                self._append_token(sequence, token_id)
            if reports:
                logprobs, prompt_logprobs = answer.logprobs.get(sequence.id), answer.prompt_logprobs.get(sequence.id)
                gained.append(SequenceOutput(sequence, token_id, logprobs, prompt_logprobs, start))
            else:
                gained.append(SequenceOutput(sequence, token_id))
        for group in searches:
            if group.error is None and all(beam.candidates is not None for beam in group.live):
                gained += self._advance_beams(group)
        return gained

    def _accept_drafts(self, output: SchedulerOutput, answer: ModelOutput, gained: list[SequenceOutput]) -> list[int]:
        """Append the guesses that were right, and return what was sampled after the last of each sequence."""
        num_gained = iter(answer.num_tokens or [1] * output.num_samples)
        token_ids = iter(answer.token_ids)
        last: list[int] = []
        for sequence, num_tokens, samples in output.scheduled:
            if not samples:
                continue
            *accepted, token_id = itertools.islice(token_ids, next(num_gained))
            last.append(token_id)
            if sequence.id not in output.draft_tokens or sequence.status.is_finished or sequence in output.dropped:
                continue
            sequence.num_draft_tokens = 0
            for guess in accepted:
                if not sequence.status.is_finished:
                    self._append_token(sequence, guess)
                    gained.append(SequenceOutput(sequence, guess))
            # Keys and values of the guesses that were wrong do not count; the caller adds num_tokens.
            num_wrong = num_tokens - 1 - len(accepted)
            sequence.num_stored_tokens -= num_wrong
            sequence.num_computed_tokens -= num_wrong
        return last

    def _advance_beams(self, group: SequenceGroup) -> list[SequenceOutput]:
        """Replace a group's beams by those that follow; what they share stays shared."""
        assert group.beams is not None
        if group.suspicion is not None:
            group.suspicion.gain_token()
        beams = group.live
        children = [self._child(continuation) for continuation in group.beams.advance(beams)]
        if children:
            group.sequences = children
        if self.waiting.charges:
            self.waiting.charge(group, 0, len(beams))
        for beam in beams:
            self.finish_sequence(beam, SequenceStatus.FINISHED_STOPPED)
        return [] if children else [SequenceOutput(beams[0], None)]

    def _child(self, continuation: Continuation[Sequence]) -> Sequence:
        parent = continuation.parent
        child = Sequence(parent.group, 0, parent.output_token_ids)
        child.output_token_ids.append(continuation.token_id)
        child.id = next(self._sequence_ids)
        child.status = SequenceStatus.RUNNING
        child.score = continuation.score
        child.max_num_tokens = parent.max_num_tokens
        self.blocks.fork(parent, child, parent.num_stored_tokens)
        child.num_forked_tokens = parent.num_tokens
        return child

    def _append_token(self, sequence: Sequence, token_id: int) -> None:
        sampling, output_token_ids = sequence.sampling, sequence.output_token_ids
        output_token_ids.append(token_id)
        num_output_tokens = len(output_token_ids)
        if (suspicion := sequence.group.suspicion) is not None:
            suspicion.gain_token()
        if self.waiting.charges:
            self.waiting.charge(sequence.group, 0, 1)
        if num_output_tokens > sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                sequence.stop_token_id = token_id
                return self.finish_sequence(sequence, SequenceStatus.FINISHED_STOPPED)
            if token_id in sampling.eos_token_ids:
                return self.finish_sequence(sequence, SequenceStatus.FINISHED_STOPPED)
        if sequence.num_prompt_tokens + num_output_tokens >= sequence.max_num_tokens:
            self.finish_sequence(sequence, SequenceStatus.FINISHED_LENGTH_CAPPED)
        return None

    # ---- ending

    def finish_sequence(self, sequence: Sequence, status: SequenceStatus) -> None:
        """End one sequence and free its blocks; nothing happens when it has ended already."""
        if sequence.status.is_finished:
            return
        group = sequence.group
        if sequence.status is SequenceStatus.RUNNING and group.beams is None:
            self.num_running_seqs -= 1
        sequence.status = status
        self.blocks.free(sequence)
        if sequence.is_known:
            self._finished.append(sequence)
        if group.is_finished:
            if group.request_id in self._by_id:
                self._forget(group)
            self.waiting.end(group.request_id)

    def finish_requests(self, request_ids: Iterable[str], status: SequenceStatus) -> list[SequenceGroup]:
        """End requests that are here or wait; returns those that there were. Unknown ids are passed over.

        Raises TypeError for a single string, whose letters would be taken for ids.
        """
        if isinstance(request_ids, str | bytes):
            raise TypeError(f"request_ids is {request_ids!r}; it must be a list of ids, of one if there is only one")
        ended: list[SequenceGroup] = []
        for request_id in request_ids:
            group = self._find(request_id)
            if group is not None:
                for sequence in group.live:
                    self.finish_sequence(sequence, status)
                ended.append(group)
        return ended

    def _find(self, request_id: str) -> SequenceGroup | None:
        """The group of this id, if it is here or waits."""
        return self._by_id.get(request_id) or self.waiting.get(request_id)


def _groups_in(output: SchedulerOutput) -> dict[SequenceGroup, None]:
    """Those of which a step computes tokens, also if they have left the worker since it was planned."""
    return dict.fromkeys(sequence.group for sequence, _, _ in output.scheduled)


def _candidates(beam: Sequence, answer: ModelOutput) -> list[tuple[int, float]]:
    """The likeliest tokens after a beam; raises ValueError when the worker did not report them."""
    if (logprobs := answer.logprobs.get(beam.id)) is None:
        raise ValueError(f"the worker returned no log-probabilities for sequence {beam.id}, which is a beam")
    return list(zip(logprobs.token_ids[1:], logprobs.logprobs[1:], strict=True))
