"""Preempts running groups, by recompute or swap, if blocks run out or a waiting group outranks them."""

from collections.abc import Iterable

from scheduler_service.core.blocks.manager import AllocStatus
from scheduler_service.core.config import PreemptionMode
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.step import Step
from scheduler_service.core.planning.worker_groups import Session


class Preemption:
    def __init__(self, session: Session, prefixes: SharedPrefixes) -> None:
        self._config = session.config
        self._waiting = session.waiting
        self._blocks = session.blocks
        self._groups = session.groups
        self._adapters = session.adapters
        self._prefixes = prefixes
        self.counts = {PreemptionMode.RECOMPUTE: 0, PreemptionMode.SWAP: 0}

    def preempt_one(self, step: Step) -> SequenceGroup:
        """Preempt the policy's victim, and return it.

        No other group shares a block that the victim fills in this step: running groups are planned before groups are
        admitted, and a swapped group resumes only if its next tokens have room.
        """
        victim = self._waiting.victim(self._groups.running)
        self._preempt(victim, step)
        return victim

    def victims(self, group: SequenceGroup, step: Step) -> list[SequenceGroup] | None:
        """The running groups to preempt for a waiting group; None if it does not outrank enough of them, or no token
        would be free."""
        victims: list[SequenceGroup] = []
        candidates = dict(self._groups.running)
        num_tokens, num_seqs = step.budget.num_tokens, step.budget.num_seqs
        while (
            not num_tokens
            or num_seqs < group.num_seqs
            or not self._adapters.has_slot(group, without=victims)
            or self._blocks.can_allocate(group, leave_watermark=bool(candidates), without=victims) is not AllocStatus.OK
        ):
            if not candidates:
                return None  # groups that wait for a prefix reserve the sequences
            victim = self._waiting.victim(candidates)
            # Blocks that this step swaps in are not filled yet.
            if step.swap_in or self._prefixes.is_tied(victim, step) or not self._waiting.outranks(group, victim):
                return None
            num_tokens += step.num_tokens_of(victim)
            if not num_tokens:
                return None
            del candidates[victim]
            victims.append(victim)
            num_seqs += victim.num_seqs
        return victims

    def preempt(self, victims: Iterable[SequenceGroup], step: Step) -> None:
        """Preempt `victims`, and remove their chunks from the step."""
        step.unfold()
        for victim in victims:
            self._preempt(victim, step)

    def _preempt(self, group: SequenceGroup, step: Step) -> None:
        chunks = step.give_back(group)
        self._prefixes.taken_back(chunks)
        step.num_preempted += 1
        # Three kinds of groups cannot be swapped out: suspects, which would resume beside other groups; targets of
        # copies and of swapping in, which are not filled yet; beams in flight, which their answer could not fork. A
        # group that was swapped in is preempted in the same step if it waits for an image and others need its room.
        is_bound = (
            group.is_suspect
            or any(chunk.copies for chunk in chunks)
            or self._arrives(group, step)
            or (group.beams is not None and any(s.num_stored_tokens < s.num_computed_tokens for s in group.live))
        )
        mode = PreemptionMode.RECOMPUTE if is_bound else self._mode(group)
        self.counts[mode] += 1
        if mode is PreemptionMode.SWAP:
            group.history.num_swaps += 1
            step.swap_out += self._groups.swap_out(group, step.now)
        else:
            group.history.num_recomputes += 1
            self._groups.give_back(group)

    def _arrives(self, group: SequenceGroup, step: Step) -> bool:
        """True if the step copies blocks of the group from the host to the device."""
        arriving = {block for _, block in step.swap_in}
        return any(block in arriving for sequence in group.live for block in self._blocks.blocks_of(sequence))

    def _mode(self, group: SequenceGroup) -> PreemptionMode:
        config = self._config
        if config.preemption_mode is PreemptionMode.RECOMPUTE or not self._blocks.can_swap_out(group):
            return PreemptionMode.RECOMPUTE
        if config.preemption_mode is PreemptionMode.SWAP:
            return PreemptionMode.SWAP
        swap = self._blocks.costs.num_swap_copies(group) * config.block_bytes * config.prefill_tokens_per_second
        recompute = self._blocks.costs.num_tokens_to_recompute(group) * config.swap_bytes_per_second
        return PreemptionMode.SWAP if swap < recompute else PreemptionMode.RECOMPUTE
