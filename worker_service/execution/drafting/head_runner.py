"""Computes the passes of a head, which drafts in place of a draft model.

A token's keys and values depend on the target's hidden state and on the *next* token. A sequence's last token therefore
has no slot in the head's cache yet. A shared block's last slot is right for only one of two sequences with different
next blocks. The target rejects wrong drafts."""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch

from kernels.inputs import upload
from pagewire_common.start_error import StartError
from worker_service.errors import is_out_of_memory
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.sampling.sampler import sample
from worker_service.execution.steps.model_runner import build_batch
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.head_layer import Head
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS, ModelOutput, SamplingParams, SchedulerOutput, StepTiming
from worker_service.wording import reason


class HeadRunner:
    """Computes the forward passes of a head for `DraftModel`."""

    def __init__(self, head: Head, cache_engine: CacheEngine, target: Decoder) -> None:
        """Make the target store its hidden states in the head's cache. Raises StartError if a trial pass of the head
        fails."""
        self.cache_engine = cache_engine
        self._head = head
        cache = cache_engine.device_blocks
        self._try()
        target.show_states(head.states_before, lambda states, slots: head.read(states, slots, cache))

    def _try(self) -> None:
        sequence = SequenceState(0, array(TOKENS, [0, 0]), 1, 0, array(TOKENS, [0, 0]), SamplingParams())
        try:
            self.execute(SchedulerOutput(epoch=0, step_id=0), [ScheduledChunk(sequence, 0, 1, samples=True)])
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise StartError(f"the head that drafts cannot be computed: {reason(error)}") from error

    @torch.inference_mode()
    def execute(self, _: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        """Compute slots [start, stop) of each chunk, and draft the token at index `stop + 1`; the token at `stop` is
        known.

        To draft on, the head stores its own hidden state in slot `stop`, until the target's hidden state replaces it.
        """
        cache = self.cache_engine.device_blocks
        block_size = cache.shape[3]
        batch = build_batch(chunks, block_size, cache.device)
        token_ids = array(TOKENS)
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start + 1 : chunk.stop + 1]
        states = self._head.forward(
            upload(token_ids, torch.int64, cache.device), batch.positions, batch.slots, batch.attention, cache
        )
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return ModelOutput([], StepTiming(0, 0, 0))
        stops = accumulate(chunk.stop - chunk.start for chunk in chunks)
        last = [stop - 1 for stop, chunk in zip(stops, chunks, strict=True) if chunk.samples]
        states = states[upload(last, torch.int64, cache.device)]
        # If steps are launched ahead, the target may already have stored its hidden state in slot `stop`. The head must
        # not overwrite it.
        keeping = [
            (row, chunk.sequence.block_ids[chunk.stop // block_size] * block_size + chunk.stop % block_size)
            for row, chunk in enumerate(sampling)
            if chunk.stop >= chunk.sequence.num_computed_tokens
        ]
        if keeping:
            rows, slots = upload(keeping, torch.int64, cache.device).T
            self._head.keep(states[rows], slots.contiguous(), cache)
        found = sample(self._head.compute_logits(states), [chunk.sequence for chunk in sampling]).tolist()
        failed = [chunk.sequence.sequence_id for chunk, one in zip(sampling, found, strict=True) if one < 0]
        return ModelOutput(found, StepTiming(0, 0, 0), failed_sequence_ids=failed)
