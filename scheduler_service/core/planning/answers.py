"""Applies a worker's answers: appends tokens and accepted drafts, advances beams, and ends complete sequences."""

import itertools
from collections.abc import Sequence as SequenceOf
from collections.abc import Set

from scheduler_service.core.groups.beam_search import Continuation
from scheduler_service.core.groups.prompt_item import EncoderItem, items_between
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ModelOutput, SchedulerOutput, SequenceOutput
from scheduler_service.core.planning.worker_groups import Session


class Answers:
    def __init__(self, session: Session) -> None:
        self._config = session.config
        self._waiting = session.waiting
        self._blocks = session.blocks
        self._groups = session.groups
        self._encoder_cache = session.encoder_cache
        self._in_flight = session.in_flight

    def take_in(self, output: SchedulerOutput, answer: ModelOutput) -> list[SequenceOutput]:
        """See `Scheduler.update_from_output`."""
        if output.is_plain and answer.is_plain and self._takes_plainly(output):
            return self._take_in_decodes(output, answer.token_ids)
        if answer.num_draft_tokens_wanted:
            self._note_drafts_wanted(output, answer)
        searches: dict[SequenceGroup, None] = {}
        gained: list[SequenceOutput] = []
        has_shares = output.num_draft_tokens or answer.num_tokens
        sampled = iter(self._accept_drafts(output, answer, gained) if has_shares else answer.token_ids)
        block_size, dropped, failed = self._config.block_size, output.dropped, answer.failed_sequence_ids
        unread: list[Sequence] = []
        if answer.failed_items:
            unread = self._without_images(output, frozenset(answer.failed_items))
            failed = failed.union([sequence.id for sequence in unread])
        reports = bool(answer.logprobs or answer.prompt_logprobs or answer.vectors)
        for sequence, num_tokens, samples in output.scheduled:
            token_id = next(sampled) if samples else None
            status = sequence.status
            if (status is not SequenceStatus.RUNNING and status.is_finished) or (dropped and sequence in dropped):
                continue
            start = sequence.num_stored_tokens + 1
            sequence.num_stored_tokens += num_tokens
            if samples and token_id is None:  # late: the last token is computed again
                sequence.num_stored_tokens -= 1
                sequence.num_computed_tokens -= 1
                self._blocks.states.late(sequence)
            if not sequence.is_encoder and (num_tokens > 1 or sequence.num_stored_tokens % block_size == 0):
                self._blocks.cache.publish(sequence, sequence.num_stored_tokens)
            if sequence.is_encoder:
                continue
            if failed and sequence.id in failed:
                self._fail(sequence, is_barred=sequence.id in answer.barred_sequence_ids)
                token_id = None
            elif token_id is not None and sequence.group.beams is not None:
                sequence.candidates = _candidates(sequence, answer)
                searches[sequence.group] = None
                continue
            elif token_id is not None:
                self._append_token(sequence, token_id)
            if reports:
                positions, prompt_logprobs = answer.logprobs.get(sequence.id), answer.prompt_logprobs.get(sequence.id)
                if sequence.sampling.pooling is not None:
                    token_id = None  # a pooled sequence samples no token
                vectors = answer.vectors.get(sequence.id, b"")
                logprobs = positions[-1] if positions else None
                start = start if prompt_logprobs or vectors else 0
                item = SequenceOutput(sequence, token_id, logprobs, prompt_logprobs, start, vectors=vectors)
                gained.append(item)
            else:
                gained.append(SequenceOutput(sequence, token_id))
        for sequence in unread:  # those that this step does not compute
            if not sequence.status.is_finished:
                self._fail(sequence, is_barred=False)
                gained.append(SequenceOutput(sequence, None))
        for group in searches:
            if not group.is_finished and all(beam.candidates is not None for beam in group.live):
                gained += self._advance_beams(group)
        return gained

    def _takes_plainly(self, output: SchedulerOutput) -> bool:
        """Whether `_take_in_decodes` would miss nothing."""
        groups = self._groups
        return not (output.dropped or groups.accused or groups.swapped or self._waiting.charges)

    def _take_in_decodes(self, output: SchedulerOutput, token_ids: SequenceOf[int]) -> list[SequenceOutput]:
        """Apply a plain answer to a plain step (see `is_plain`), in half the time of `take_in`."""
        running, block_size, gained = SequenceStatus.RUNNING, self._config.block_size, []
        # The named tuple's constructor spends two thirds of its time in Python code.
        new = tuple.__new__
        for (sequence, _, _), token_id in zip(output.scheduled, token_ids, strict=True):
            if sequence.status is not running:
                continue
            sequence.num_stored_tokens = num_stored = sequence.num_stored_tokens + 1
            if num_stored % block_size == 0:
                self._blocks.cache.publish(sequence, num_stored)
            sequence.output_token_ids.append(token_id)
            if token_id in sequence.end_token_ids or num_stored + 1 >= sequence.max_num_tokens:
                self._end_if_due(sequence, token_id)
            gained.append(new(SequenceOutput, (sequence, token_id, None, None, 0, False, b"")))
        return gained

    def _append_token(self, sequence: Sequence, token_id: int) -> None:
        sequence.output_token_ids.append(token_id)
        if (suspicion := sequence.group.suspicion) is not None:
            suspicion.gain_token()
        if self._waiting.charges:
            self._waiting.charge(sequence.group, 0, 1)
        self._end_if_due(sequence, token_id)

    def _end_if_due(self, sequence: Sequence, token_id: int) -> None:
        """End a sequence if `token_id` is an end token, or if it has its maximum length."""
        sampling = sequence.sampling
        if token_id in sequence.end_token_ids and sequence.num_output_tokens > sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                sequence.stop_token_id = token_id
            self._groups.finish_sequence(sequence, SequenceStatus.FINISHED_STOPPED)
        elif sequence.num_tokens >= sequence.max_num_tokens:
            self._groups.finish_sequence(sequence, SequenceStatus.FINISHED_LENGTH_CAPPED)

    def _fail(self, sequence: Sequence, *, is_barred: bool) -> None:
        """End a sequence, or a beam's whole group, for which no token could be chosen. Unless `is_barred`, the logits
        were not finite, and its blocks cannot be trusted."""
        if not is_barred:
            self._blocks.withdraw(sequence)
        status = SequenceStatus.FINISHED_BARRED if is_barred else SequenceStatus.FINISHED_FAILED
        if sequence.group.beams is not None:
            self._groups.finish(sequence.group, status)
        else:
            self._groups.finish_sequence(sequence, status)

    def _without_images(self, output: SchedulerOutput, names: Set[EncoderItem]) -> list[Sequence]:
        """Forget images that the worker could not decode, and cached blocks that this step or a later one computed
        from them. Returns the sequences of all groups here that have computed any of the images' tokens."""
        self._encoder_cache.fail(names)
        for step in (output, *self._in_flight.outputs):
            for sequence, _, _ in step.scheduled:  # also of groups that have left
                for item in sequence.group.images:
                    if item.encoder_item in names:
                        first = item.start // self._config.block_size
                        self._blocks.cache.withdraw_chains(sequence.block_keys[first:])
        found: list[Sequence] = []
        for group in (*self._groups.running, *self._groups.swapped):
            computed = max(sequence.num_computed_tokens for sequence in group.live)
            if any(item.encoder_item in names for item in items_between(group.images, 0, computed)):
                group.error = "the model could not read an image of the prompt"
                found += group.live
        return found

    # ---- drafts

    def _note_drafts_wanted(self, output: SchedulerOutput, answer: ModelOutput) -> None:
        """Beams get no room for drafts, because a beam has several next tokens."""
        sampled = (sequence for sequence, _, samples in output.scheduled if samples)
        for sequence, wanted in zip(sampled, answer.num_draft_tokens_wanted, strict=True):
            if sequence not in output.dropped and sequence.group.beams is None:
                sequence.num_draft_tokens_wanted = min(wanted, self._config.num_lookahead_slots)

    def _accept_drafts(
        self, output: SchedulerOutput, answer: ModelOutput, gained: list[SequenceOutput]
    ) -> list[int | None]:
        """Append the accepted drafts. Returns the token that each sequence sampled after its drafts, or None if it is
        late."""
        num_gained = iter(answer.num_tokens or [1] * output.num_samples)
        token_ids = iter(answer.token_ids)
        last: list[int | None] = []
        for sequence, _, samples in output.scheduled:
            if not samples:
                continue
            accepted = list(itertools.islice(token_ids, next(num_gained)))
            last.append(accepted.pop() if accepted else None)
            room = output.num_draft_tokens.get(sequence, 0)
            if not room or sequence in output.dropped or sequence.status.is_finished:
                continue
            sequence.num_draft_tokens -= room
            positions = answer.logprobs.get(sequence.id, [])[: len(accepted)]
            for token_id, logprobs in itertools.zip_longest(accepted, positions):
                if not sequence.status.is_finished:
                    self._append_token(sequence, token_id)
                    goes_on = not sequence.status.is_finished
                    gained.append(SequenceOutput(sequence, token_id, logprobs, goes_on=goes_on))
            # The caller counts the whole chunk as stored, so rejected drafts are subtracted here.
            num_unused = room - len(accepted)
            sequence.num_stored_tokens -= num_unused
            sequence.num_computed_tokens -= num_unused
        return last

    # ---- beams

    def _advance_beams(self, group: SequenceGroup) -> list[SequenceOutput]:
        """Replace a group's beams by the next step's. Beams with the same parent share its blocks."""
        assert group.beams is not None
        if group.suspicion is not None:
            group.suspicion.gain_token()
        beams = group.live
        children = [self._child(continuation) for continuation in group.beams.advance(beams)]
        if children:
            group.sequences = children
        if self._waiting.charges:
            self._waiting.charge(group, 0, len(beams))
        for beam in beams:
            self._groups.finish_sequence(beam, SequenceStatus.FINISHED_STOPPED)
        return [] if children else [SequenceOutput(beams[0], None)]

    def _child(self, continuation: Continuation[Sequence]) -> Sequence:
        parent = continuation.parent
        child = Sequence(parent.group, 0, parent.output_token_ids)
        child.output_token_ids.append(continuation.token_id)
        child.id = self._groups.new_sequence_id()
        child.status = SequenceStatus.RUNNING
        child.score = continuation.score
        child.max_num_tokens = parent.max_num_tokens
        self._blocks.fork(parent, child, parent.num_stored_tokens)
        child.num_forked_tokens = parent.num_tokens
        return child


def _candidates(beam: Sequence, answer: ModelOutput) -> list[tuple[int, float]]:
    """A beam's likeliest next tokens. Raises ValueError if the worker reported no log-probabilities."""
    if not (positions := answer.logprobs.get(beam.id)):
        raise ValueError(f"the worker returned no log-probabilities for sequence {beam.id}, which is a beam")
    (logprobs,) = positions
    return list(zip(logprobs.token_ids[1:], logprobs.logprobs[1:], strict=True))
