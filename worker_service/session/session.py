"""The worker's copy of a session's state.

`Session` checks each step against the live sequences, so that no sequence reads or writes another's memory. An error in
a step ends the session, because a part of the step may have been applied. No tensors, devices or gRPC here."""

import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, repeat

from worker_service.errors import FencingError, InvalidStepError
from worker_service.session.encoded_images import EncodedImages
from worker_service.session.prompt_items import SessionItems
from worker_service.session.sequence_state import NO_DRAFTS, PLACEHOLDER, ScheduledChunk, SequenceState
from worker_service.session.step import (
    TOKENS,
    BlockTableUpdate,
    Fork,
    Limits,
    NewSequence,
    PoolingType,
    SchedulerOutput,
)


class Session:
    """The live sequences of one session. For each step: `apply`, launch, `advance`, and `fill_in` with the sampled
    tokens. If `follows_unseen`, the next step's `apply` may precede `fill_in`."""

    def __init__(self, epoch: int, limits: Limits) -> None:
        self.epoch = epoch
        self.sequences: dict[int, SequenceState] = {}
        self._limits = limits
        self._items = SessionItems(limits.images)
        self._encoded = EncodedImages(limits, self._items)
        self._next_step_id = 1
        self._has_room = False  # whether the last step may have drafts

    def apply(self, output: SchedulerOutput) -> list[ScheduledChunk]:
        """Apply a step's changes. Returns the chunks in the order of `output.sequence_ids`.

        Preempted sequences are removed first. Finished sequences are removed last, because a finished sequence may be
        the parent of a fork. Raises FencingError for a step out of order, and InvalidStepError for a step that
        contradicts the session's state."""
        if output.epoch != self.epoch:
            raise FencingError(f"epoch {output.epoch} in the session of epoch {self.epoch}")
        if output.step_id != self._next_step_id:
            raise FencingError(f"step_id {output.step_id} where {self._next_step_id} was expected")
        self._next_step_id += 1
        self._forget(output.preempted)
        self._items.drop(output.dropped_items)
        self._encoded.drop(output.dropped_embeddings)
        for new in output.new_sequences:
            self._add(new)
        for fork in output.forks:
            self._fork(fork)
        for update in output.block_table_updates:
            self._update_block_table(update)
        self._forget(output.finished)
        self._has_room = bool(output.num_draft_tokens)
        return self._schedule(output)

    def with_images(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> SchedulerOutput:
        """An applied step with the images that it encodes or prepares. Raises InvalidStepError if it contradicts the
        encoder cache."""
        if self._limits.images is None:
            if output.items_to_encode:
                raise InvalidStepError("items_to_encode: this worker reads no images")
            return output
        images = self._encoded.encode(output.items_to_encode)
        self._encoded.check(chunks)
        ahead = self._encoded.ahead(output.items_ahead)
        return replace(output, images=images, images_ahead=ahead) if images or ahead else output

    def follows_unseen(self, output: SchedulerOutput) -> bool:
        """Whether a step can be launched before the host has read the last step's tokens. Drafts and edited logits
        exclude a step, because both may need the tokens.

        Log-probabilities and vectors also exclude a step: reading the results would wait for all launched work and
        delay every sequence."""
        new = {one.sequence_id: one.sampling for one in output.new_sequences}
        if output.forks or output.num_draft_tokens or self._has_room or not new.keys().isdisjoint(self.sequences):
            return False
        for sequence_id in output.sequence_ids:
            if (sequence := self.sequences.get(sequence_id)) is not None:
                waits = sequence.sampling.edits_logits or sequence.reports
            else:
                waits = sequence_id not in new or new[sequence_id].edits_logits or new[sequence_id].reports
            if waits:
                return False
        return True

    @staticmethod
    def advance(chunks: Iterable[ScheduledChunk]) -> None:
        """Record that a step is launched. A sequence that samples gains a placeholder. A sequence with drafts is left
        unchanged, because the number of gained tokens is not known yet."""
        for sequence, _, stop, samples, drafts in chunks:
            if drafts:
                continue
            sequence.num_computed_tokens = stop
            sequence.features = b""  # an encoder input is computed once
            if samples:
                sequence.token_ids.append(PLACEHOLDER)

    @staticmethod
    def fill_in(chunks: Iterable[ScheduledChunk], token_ids: Iterable[int], num_tokens: Iterable[int] = ()) -> None:
        """Replace placeholders by the sampled tokens, in the order of the chunks. num_tokens: gained by each chunk, 1
        by default. A sequence that gained none computes its last token again."""
        tokens, numbers = iter(token_ids), iter(num_tokens)
        for sequence, _, stop, samples, drafts in chunks:
            if not samples:
                continue
            gained = list(islice(tokens, next(numbers, 1)))
            if drafts or not gained:
                del sequence.token_ids[stop - len(drafts) :]
                sequence.token_ids.extend(gained)
                sequence.num_computed_tokens = len(sequence.token_ids) - 1
            else:
                (sequence.token_ids[stop],) = gained

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            # The scheduler may remove a sequence twice: preempt and then abort it.
            self.sequences.pop(sequence_id, None)

    def _add(self, new: NewSequence) -> None:
        self._insert(
            SequenceState(
                new.sequence_id,
                new.token_ids,
                new.num_prompt_tokens,
                new.num_computed_tokens,
                new.block_ids,
                new.sampling,
                new.adapter,
                is_encoder=new.is_encoder,
                features=new.features,
                encoder=self._encoder(new),
                further_tables=new.further_tables,
                items=self._items.take(new),
            )
        )

    def _encoder(self, new: NewSequence) -> SequenceState | None:
        """The encoder input of a new sequence. Raises InvalidStepError if it is required and missing."""
        if new.is_encoder or not self._limits.max_encoder_len:
            return None
        encoder = self._known(new.encoder_id)
        if not encoder.is_encoder:
            raise InvalidStepError(f"sequence {new.sequence_id}: sequence {new.encoder_id} is no encoder input")
        return encoder

    def _fork(self, fork: Fork) -> None:
        parent = self._known(fork.parent_id)
        if parent.sampling.pooling is not None or parent.is_encoder:
            raise InvalidStepError(f"sequence {fork.parent_id} has no outputs and cannot be forked")
        if not parent.num_prompt_tokens <= fork.num_tokens <= len(parent.token_ids):
            raise InvalidStepError(
                f"sequence {fork.child_id} takes {fork.num_tokens} tokens of sequence {fork.parent_id}, "
                f"which has {parent.num_prompt_tokens} prompt tokens and {len(parent.token_ids)} in all"
            )
        if fork.num_computed_tokens > parent.num_computed_tokens:
            raise InvalidStepError(
                f"sequence {fork.child_id} takes {fork.num_computed_tokens} computed tokens of sequence "
                f"{fork.parent_id}, which has {parent.num_computed_tokens}"
            )
        if any(item.lacks_embeddings and item.stop > fork.num_computed_tokens for item in parent.items):
            raise InvalidStepError(
                f"sequence {fork.child_id} takes {fork.num_computed_tokens} computed tokens of sequence "
                f"{fork.parent_id}, and would read embeddings that this worker was not sent"
            )
        self._insert(
            SequenceState(
                fork.child_id,
                parent.token_ids[: fork.num_tokens] + fork.token_ids,
                parent.num_prompt_tokens,
                fork.num_computed_tokens,
                fork.block_ids,
                replace(parent.sampling, index=fork.index),
                parent.adapter,
                encoder=parent.encoder,
                further_tables=fork.further_tables,
                items=parent.items,
            )
        )

    def _insert(self, sequence: SequenceState) -> None:
        if sequence.sequence_id in self.sequences:
            raise InvalidStepError(f"sequence {sequence.sequence_id} is known already")
        if sequence.num_computed_tokens > len(sequence.token_ids):
            raise InvalidStepError(
                f"sequence {sequence.sequence_id} has {sequence.num_computed_tokens} computed tokens "
                f"of {len(sequence.token_ids)}"
            )
        self.sequences[sequence.sequence_id] = sequence

    def _update_block_table(self, update: BlockTableUpdate) -> None:
        block_ids = self._known(update.sequence_id).tables[update.layer_group]
        if update.start > len(block_ids):
            raise InvalidStepError(
                f"the block table of sequence {update.sequence_id} has {len(block_ids)} entries "
                f"and cannot change from entry {update.start} on"
            )
        block_ids[update.start :] = update.block_ids

    def _schedule(self, output: SchedulerOutput) -> list[ScheduledChunk]:
        chunks = []
        for sequence_id, num_tokens, samples, room in zip(
            output.sequence_ids,
            output.num_scheduled_tokens,
            output.samples,
            output.num_draft_tokens or repeat(0, len(output.sequence_ids)),
            strict=True,
        ):
            sequence = self._known(sequence_id)
            drafts = array(TOKENS, [PLACEHOLDER]) * room if room else NO_DRAFTS
            start, known = sequence.num_computed_tokens, len(sequence.token_ids) + room
            stop = start + num_tokens
            if drafts and not (samples and stop == known and start == len(sequence.token_ids) - 1):
                raise InvalidStepError(f"num_draft_tokens: sequence {sequence_id} does not go on from its last token")
            self._check_pooling(sequence, stop, drafts)
            if stop > known:
                raise InvalidStepError(
                    f"sequence {sequence_id} cannot compute {num_tokens} tokens from token {start} on: it has {known}"
                )
            if samples and stop != known:
                raise InvalidStepError(
                    f"sequence {sequence_id} cannot sample after token {stop}: it has {known} tokens"
                )
            if sequence.is_encoder:
                self._check_encoder(sequence, stop, samples)
            elif stop > self._limits.max_model_len:
                raise InvalidStepError(
                    f"sequence {sequence_id} would reach {stop} tokens; the limit is {self._limits.max_model_len}"
                )
            num_slots = min(map(operator.mul, map(len, sequence.tables), self._limits.block_sizes))
            if stop > num_slots and not self._limits.is_encoder:
                raise InvalidStepError(
                    f"the block table of sequence {sequence_id} has room for {num_slots} tokens, not for {stop}"
                )
            chunks.append(ScheduledChunk(sequence, start, stop, samples, drafts))
        if self._limits.max_encoder_len:
            self._check_encoders(chunks)
        self._check_states(chunks)
        return chunks

    def _check_states(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Raise InvalidStepError if two sequences would write the same states."""
        for group in range(len(self._limits.layer_groups)):
            if self._limits.has_states(group):
                owners: dict[int, int] = {}
                for sequence, *_ in chunks:
                    block, sequence_id = sequence.tables[group][0], sequence.sequence_id
                    if (other := owners.setdefault(block, sequence_id)) != sequence_id:
                        raise InvalidStepError(f"sequences {other} and {sequence_id} have states in block {block}")

    def _check_encoder(self, sequence: SequenceState, stop: int, samples: bool) -> None:
        """Raise InvalidStepError if the encoder input is not computed whole, or lacks audio features."""
        where = f"sequence {sequence.sequence_id} is an encoder input"
        if samples or sequence.num_computed_tokens or stop != len(sequence.token_ids):
            raise InvalidStepError(f"{where} and is not computed whole")
        if len(sequence.features) != self._limits.feature_bytes:
            raise InvalidStepError(f"{where} and came without features")

    def _check_encoders(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Raise InvalidStepError for too many encoder tokens or other tokens, or for an encoder input that is not
        computed."""
        encoded = {chunk.sequence.sequence_id for chunk in chunks if chunk.sequence.is_encoder}
        num_encoder_tokens = sum(chunk.stop for chunk in chunks if chunk.sequence.is_encoder)
        num_tokens = sum(chunk.stop - chunk.start for chunk in chunks) - num_encoder_tokens
        for sequence, *_ in chunks:
            encoder = sequence.encoder
            if encoder is None:
                continue
            is_there = self.sequences.get(encoder.sequence_id) is encoder
            is_there &= len(encoder.block_ids) * self._limits.block_size >= encoder.num_prompt_tokens
            if not is_there or not (encoder.num_computed_tokens or encoder.sequence_id in encoded):
                raise InvalidStepError(
                    f"sequence {sequence.sequence_id} attends to sequence {encoder.sequence_id}, which is not computed"
                )
        for number, kind, most in (
            (num_tokens, "tokens outside of encoder inputs", self._limits.max_num_batched_tokens),
            (num_encoder_tokens, "tokens of encoder inputs", self._limits.max_num_encoder_tokens),
        ):
            if number > most:
                raise InvalidStepError(f"{number} {kind}; the limit is {most}")

    def _check_pooling(self, sequence: SequenceState, stop: int, drafts: "array[int]") -> None:
        """Raise InvalidStepError if the worker cannot pool the sequence, or for tokens after a pooled prompt."""
        where = f"sequence {sequence.sequence_id}"
        pooling = sequence.sampling.pooling
        if pooling is not None:
            aligns = pooling.type is PoolingType.ALIGNMENT
            if not (self._limits.aligns if aligns else not self._limits.max_encoder_len):
                raise InvalidStepError(f"{where} is pooled by {pooling.type.name}, which this worker does not do")
        if pooling is None:
            if self._limits.is_encoder:
                raise InvalidStepError(f"{where} samples tokens, and this worker's model is an encoder")
            return
        if drafts or stop > sequence.num_prompt_tokens:
            raise InvalidStepError(f"{where} is pooled and has nothing to compute but its prompt")
        if self._limits.is_encoder and not sequence.num_computed_tokens == stop - sequence.num_prompt_tokens == 0:
            raise InvalidStepError(f"{where} is not computed whole, and this worker's model is an encoder")

    def _known(self, sequence_id: int) -> SequenceState:
        try:
            return self.sequences[sequence_id]
        except KeyError:
            raise InvalidStepError(f"sequence {sequence_id} is not known") from None
