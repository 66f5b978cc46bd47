"""Computes steps: moves blocks, runs the model over the batch, samples. It trusts that the session has judged the step.

Logits are made only for the rows that need them: one for each sequence that samples, and those of prompts whose
log-probabilities were asked for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.upload import upload
from worker_service.batch import build_batch
from worker_service.cache_engine import CacheEngine
from worker_service.decode_graphs import DecodeGraphs
from worker_service.errors import DeviceLostError
from worker_service.logprobs import concatenate, gather_logprobs, sample_logprobs
from worker_service.models.causal_model import CausalModel
from worker_service.sampler import sample
from worker_service.session import ScheduledChunk
from worker_service.step import ModelOutput, SampleLogprobs, SchedulerOutput, StepTiming
from worker_service.step_clock import StepClock

_LOGPROB_ROWS = 256
"""Prompt rows whose logits exist at a time; 2,048 rows of 49,152 float32 logits would be 400 MB."""


class ModelRunner:
    """A model and its cache on one device. Not thread-safe: one thread owns the device.

    A step waits for a GPU when it reads the sampled tokens, at its end, and before that only for log-probabilities.
    """

    def __init__(
        self, model: CausalModel, cache_engine: CacheEngine, decode_graphs: DecodeGraphs | None = None
    ) -> None:
        self.model = model
        self.cache_engine = cache_engine
        self._decode_graphs = decode_graphs
        self._device = cache_engine.device_blocks.device
        self._clock = StepClock(self._device)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        """Compute one step. `chunks` is `output`'s work as the session returned it."""
        self._clock.start()
        self.cache_engine.move(output)
        self._clock.mark()
        if not chunks:
            (move_us,) = self._clock.durations()
            return ModelOutput([], StepTiming(move_us=move_us, forward_us=0, sample_us=0))
        hidden, query_start = self._forward(chunks)
        sampling = [(stop - 1, chunk) for stop, chunk in zip(query_start[1:], chunks, strict=True) if chunk.samples]
        if len(sampling) < len(hidden):
            rows = upload([row for row, _ in sampling], torch.int64, self._device)
            logits = self.model.compute_logits(hidden[rows])
        else:
            logits = self.model.compute_logits(hidden)
        self._clock.mark()

        sequences = [chunk.sequence for _, chunk in sampling]
        token_ids, failed = sample(logits, sequences) if sequences else ([], [])
        logprobs = sample_logprobs(logits, token_ids, failed, sequences)
        prompt_logprobs = [
            report
            for chunk, start, stop in zip(chunks, query_start, query_start[1:], strict=False)
            if chunk.sequence.sampling.prompt_logprobs is not None
            and (report := self._prompt_logprobs(chunk, hidden[start:stop])) is not None
        ]
        self._clock.mark()
        return ModelOutput(
            token_ids=token_ids,
            timing=StepTiming(*self._clock.durations()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed_sequence_ids=[
                sequence.sequence_id for sequence, without in zip(sequences, failed, strict=True) if without
            ],
        )

    def _forward(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Sequence[int]]:
        """The hidden states, and the first row of each chunk and behind the last one the number of rows."""
        if self._decode_graphs is not None and self._decode_graphs.fit(chunks):
            return self._decode_graphs.forward(chunks), range(len(chunks) + 1)
        cache = self.cache_engine.device_blocks
        batch = build_batch(chunks, cache.shape[3], self._device)
        return self.model.forward(
            batch.token_ids, batch.positions, batch.slots, batch.attention, cache
        ), batch.query_start

    def recover(self) -> None:
        """Give back what a failed step held, so that the next one has room; call it when its tensors are gone.

        Raises DeviceLostError where the failure has taken the device with it: after an illegal access or a failed
        assertion in a kernel, every further call into CUDA fails in this process.
        """
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(str(error).partition("\n")[0]) from None

    def _prompt_logprobs(self, chunk: ScheduledChunk, hidden: Tensor) -> SampleLogprobs | None:
        """Of the prompt tokens that the chunk's rows predict: from its second to the one behind its last.

        hidden: [chunk's tokens, hidden_size].
        """
        num_top = chunk.sequence.sampling.prompt_logprobs
        first, last = chunk.start + 1, min(chunk.stop + 1, chunk.sequence.num_prompt_tokens)
        if num_top is None or first >= last:
            return None
        token_ids = upload(chunk.sequence.token_ids[first:last], torch.int64, self._device)
        rows = torch.split(hidden[: len(token_ids)], _LOGPROB_ROWS)
        return concatenate(
            [
                gather_logprobs(self.model.compute_logits(part), tokens, chunk.sequence.sequence_id, num_top)
                for part, tokens in zip(rows, torch.split(token_ids, _LOGPROB_ROWS), strict=True)
            ]
        )
