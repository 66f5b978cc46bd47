"""Computes steps: moves blocks, runs the model over the batch, samples. It trusts that the session has judged the step.

Logits are made only for the rows that need them: one for each sequence that samples, and those of prompts whose
log-probabilities were asked for.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from worker_service.batch import build_batch
from worker_service.cache_engine import CacheEngine
from worker_service.logprobs import concatenate, gather_logprobs, sample_logprobs
from worker_service.models.causal_model import CausalModel
from worker_service.sampler import sample
from worker_service.session import ScheduledChunk
from worker_service.step import ModelOutput, SampleLogprobs, SchedulerOutput, StepTiming

_LOGPROB_ROWS = 256
"""Prompt rows whose logits exist at a time; 2,048 rows of 49,152 float32 logits would be 400 MB."""


class ModelRunner:
    """A model and its cache on one device. Not thread-safe: one thread owns the device."""

    def __init__(self, model: CausalModel, cache_engine: CacheEngine) -> None:
        self.model = model
        self.cache_engine = cache_engine
        self._device = cache_engine.device_blocks.device

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        """Compute one step. `chunks` is `output`'s work as the session returned it."""
        started = self._now()
        self.cache_engine.move(output)
        moved = self._now()
        if not chunks:
            return ModelOutput([], StepTiming(move_us=moved - started, forward_us=0, sample_us=0))
        batch = build_batch(chunks, self.cache_engine.device_blocks.shape[3], self._device)
        hidden = self.model.forward(
            batch.token_ids, batch.positions, batch.slots, batch.attention, self.cache_engine.device_blocks
        )
        sampling = [
            (stop - 1, chunk) for stop, chunk in zip(batch.query_start[1:], chunks, strict=True) if chunk.samples
        ]
        all_sample = len(sampling) == len(hidden)
        logits = self.model.compute_logits(hidden if all_sample else hidden[[row for row, _ in sampling]])
        forwarded = self._now()

        sequences = [chunk.sequence for _, chunk in sampling]
        token_ids, failed = sample(logits, sequences) if sequences else ([], [])
        logprobs = sample_logprobs(logits, token_ids, failed, sequences)
        prompt_logprobs = [
            report
            for chunk, start, stop in zip(chunks, batch.query_start, batch.query_start[1:], strict=False)
            if (report := self._prompt_logprobs(chunk, hidden[start:stop])) is not None
        ]
        return ModelOutput(
            token_ids=token_ids,
            timing=StepTiming(move_us=moved - started, forward_us=forwarded - moved, sample_us=self._now() - forwarded),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed_sequence_ids=[
                sequence.sequence_id for sequence, without in zip(sequences, failed, strict=True) if without
            ],
        )

    def _prompt_logprobs(self, chunk: ScheduledChunk, hidden: Tensor) -> SampleLogprobs | None:
        """Of the prompt tokens that the chunk's rows predict: from its second to the one behind its last.

        hidden: [chunk's tokens, hidden_size].
        """
        num_top = chunk.sequence.sampling.prompt_logprobs
        first, last = chunk.start + 1, min(chunk.stop + 1, chunk.sequence.num_prompt_tokens)
        if num_top is None or first >= last:
            return None
        token_ids = torch.tensor(chunk.sequence.token_ids[first:last], device=self._device)
        rows = torch.split(hidden[: len(token_ids)], _LOGPROB_ROWS)
        return concatenate(
            [
                gather_logprobs(self.model.compute_logits(part), tokens, chunk.sequence.sequence_id, num_top)
                for part, tokens in zip(rows, torch.split(token_ids, _LOGPROB_ROWS), strict=True)
            ]
        )

    def _now(self) -> int:
        """Microseconds, once the device has done what was asked of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns() // 1000
