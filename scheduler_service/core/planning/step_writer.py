"""Writes a planned step out: what the worker must be told, and what that makes of sequences and groups.

Everything is said once. A sequence's first step carries it whole, or as a fork of another one; after that only its
block table's new entries are sent, and what has left since the step before.
"""

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.outputs import BlockTableUpdate, Fork, NewSequence, ScheduledSequence, SchedulerOutput
from scheduler_service.core.placement.choice import Placement
from scheduler_service.core.planning.budget import SchedulingBudget
from scheduler_service.core.planning.ledger import GroupLedger
from scheduler_service.core.queues.waiting_queue import WaitingQueue


class Chunk:
    """What one sequence takes of a step, until the step is written out."""

    __slots__ = ("copies", "num_bytes", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, num_bytes: int, copies: list[tuple[int, int]]) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.copies = copies


class Step:
    """A step being planned."""

    __slots__ = (
        "budget",
        "chunks",
        "held",
        "ignored",
        "left",
        "moved",
        "needy",
        "now",
        "num_long",
        "num_preempted",
        "placements",
        "prompts",
        "prompts_began",
        "slotless",
        "steady",
        "swap_in",
        "swap_out",
        "upcoming",
    )

    def __init__(self, budget: SchedulingBudget, now: float) -> None:
        self.budget = budget
        self.now = now
        self.chunks: dict[SequenceGroup, list[Chunk]] = {}
        self.ignored: list[SequenceGroup] = []
        self.left: dict[SequenceGroup, Placement] = {}  # waiting groups that are for other workers
        self.slotless: dict[SequenceGroup, None] = {}  # groups passed over: their adapters have no slot here
        self.upcoming: list[
            SequenceGroup
        ] = []  # waiting groups that are next, as far as they are known, the first one last
        self.held: dict[SequenceGroup, float] = {}  # suspects that wait, and until when
        self.moved: list[Placement] = []
        self.placements: list[Placement] = []
        self.prompts: list[SequenceGroup] = []  # running groups that were behind, or are new, or back
        self.num_preempted = 0
        self.num_long = 0  # sequences among the chunks that need more than `max_prefill_chunk` tokens
        self.prompts_began: float | None = None
        self.steady: list[ScheduledSequence] = []  # the last step's plan, when it holds again
        self.needy: list[Sequence] = []  # those of it whose block tables grew
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []

    def num_tokens_of(self, group: SequenceGroup) -> int:
        """What a group takes of the step, as it is planned by now."""
        num_repeated = sum(sequence.group is group for sequence, _, _ in self.steady)
        return num_repeated + sum(chunk.num_tokens for chunk in self.chunks.get(group, ()))


class StepWriter(GroupLedger):
    """A ledger that keeps what the worker knows in step with what it is sent."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, worker: str = "", now: float = 0.0) -> None:
        super().__init__(config, waiting, worker, now)
        self._step_id = 0

    def write(self, step: Step) -> SchedulerOutput:
        """Take a plan as sent: what it computes counts as computed from now on."""
        output = SchedulerOutput(
            self._step_id + 1,
            ignored=step.ignored,
            blocks_to_swap_out=step.swap_out,
            blocks_to_swap_in=step.swap_in,
            prompts_began=step.prompts_began,
            num_tokens=self.config.max_num_batched_tokens - step.budget.num_tokens,
            planned_at=step.now,
        )
        for sequence in step.needy:
            self._write_table(sequence, output)
        any_last = False
        for sequence, _, _ in step.steady:
            num_computed = sequence.num_computed_tokens = sequence.num_computed_tokens + 1
            if num_computed + 1 >= sequence.max_num_tokens:
                any_last = True
        scheduled: list[ScheduledSequence] = []
        for chunks in step.chunks.values():
            for chunk in chunks:
                samples = chunk.num_tokens >= chunk.sequence.num_uncomputed_tokens
                self._write_draft(chunk.sequence, chunk.num_tokens - chunk.sequence.num_uncomputed_tokens, output)
                scheduled.append(ScheduledSequence(chunk.sequence, chunk.num_tokens, samples))
                output.blocks_to_copy += chunk.copies
                self._write_table(chunk.sequence, output)
                chunk.sequence.num_computed_tokens += chunk.num_tokens
                if chunk.sequence.group.has_unforked:
                    self._fork_followers(chunk.sequence)
        output.scheduled = step.steady + scheduled if scheduled else step.steady
        output.num_samples = len(step.steady) + sum(chunk.samples for chunk in scheduled)
        if scheduled or any_last or not step.steady:
            self._steady = self._plan_ahead(step)
        for sequence in self._finished:
            output.finished.append(sequence.id)
            sequence.is_known = False
        self._finished.clear()
        output.preempted, self._preempted = self._preempted, []
        self.report(step)
        if step.placements or step.left or step.held or step.moved:
            self._write_placements(step, output)
        if not output.is_empty:
            self._step_id += 1
            self._in_flight.append(output)
        return output

    def report(self, step: Step) -> None:
        """Tell the balancer what there is to do here, as of this step."""
        backlog = 0
        for group in step.prompts:
            if group in self.running:
                for sequence in group.live:
                    if sequence.id in self.blocks.tables:
                        backlog += max(0, sequence.num_tokens - sequence.num_computed_tokens)
        self._report(backlog, self.config.max_num_seqs - step.budget.num_seqs)

    def _write_placements(self, step: Step, output: SchedulerOutput) -> None:
        output.moved = step.moved
        output.placements = [*step.placements, *step.left.values()] if step.left else step.placements
        until = [
            group.left_until for group in step.left if group.left_until is not None and group.left_until >= step.now
        ]
        until += step.held.values()
        output.ask_again_at = min(until) if until else None

    def _plan_ahead(self, step: Step) -> list[ScheduledSequence] | None:
        """The next step, if everybody just computes one token in it or has computed the last; else None.

        Beams never just go on. Sequences of a group of several may share the block that they write to next, and get
        copies in a step that is planned in full; a single one never does.
        """
        plan = [s for s in step.steady if s.sequence.num_computed_tokens + 1 < s.sequence.max_num_tokens]
        for group in step.chunks if step.steady else self.running:
            prepared = None
            if group.beams is not None:
                return None
            if len(group.sequences) > 1:
                prepared = {chunk.sequence for chunk in step.chunks.get(group, []) if chunk.num_tokens == 1}
            for sequence in group.live:
                num_uncomputed = sequence.num_uncomputed_tokens
                if num_uncomputed == 1 and (prepared is None or sequence in prepared):
                    plan.append(ScheduledSequence(sequence, 1, True))
                elif num_uncomputed or sequence.num_computed_tokens + 1 < sequence.max_num_tokens:
                    return None
        return plan or None

    def _fork_followers(self, leader: Sequence) -> None:
        """Once the prompt is computed, those who have no blocks yet go on from it, in steps after that one.

        A follower that has no output yet computes the last prompt token itself, because what it needs is that
        token's logits, not its keys and values.
        """
        group = leader.group
        if leader.num_computed_tokens < leader.num_prompt_tokens:
            return
        group.has_unforked = False
        for follower in group.live:
            if follower.id not in self.blocks.tables:
                self.blocks.fork(leader, follower, min(follower.num_prompt_tokens, follower.num_tokens - 1))
                follower.num_forked_tokens = follower.num_prompt_tokens

    def _write_draft(self, sequence: Sequence, num_draft_tokens: int, output: SchedulerOutput) -> None:
        if num_draft_tokens > 0:
            output.draft_tokens[sequence.id] = sequence.draft_token_ids[:num_draft_tokens]
            sequence.num_draft_tokens = num_draft_tokens
        sequence.draft_token_ids = []

    def _write_table(self, sequence: Sequence, output: SchedulerOutput) -> None:
        """Tell the worker what it does not know of a sequence and its block table."""
        table, num_known = self.blocks.tables[sequence.id], sequence.num_known_blocks
        if not sequence.is_known:
            sequence.is_known = True
            parent, sequence.forked_from = sequence.forked_from, None
            if parent is not None and parent.is_known:
                num_forked, num_computed = sequence.num_forked_tokens, sequence.num_computed_tokens
                output.forks.append(Fork(parent.id, sequence, num_forked, table, num_computed))
            else:
                output.new_sequences.append(NewSequence(sequence, table, sequence.num_computed_tokens))
        elif num_known < len(table):
            output.block_table_updates.append(BlockTableUpdate(sequence.id, num_known, table[num_known:]))
        sequence.num_known_blocks = len(table)
