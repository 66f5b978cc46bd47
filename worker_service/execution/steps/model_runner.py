"""Computes the steps of a decoder: moves blocks, runs the model over the batch, and samples tokens. The session has
already checked each step.

Logits are computed only for rows after which a token is sampled, and for prompts whose log-probabilities are requested.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels.upload import upload
from worker_service.errors import DeviceLostError, InvalidStepError
from worker_service.execution.adapters.adapters import Adapters
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.sampling.form_masks import FormMasks
from worker_service.execution.sampling.forms import Forms
from worker_service.execution.sampling.logprobs import check_finite, concatenate, gather_logprobs
from worker_service.execution.sampling.pooling import pool_all
from worker_service.execution.sampling.sampler import sample
from worker_service.execution.steps.batch import build_batch
from worker_service.execution.steps.decode_graphs import DecodeGraphs
from worker_service.execution.steps.running_step import RunningStep
from worker_service.execution.steps.step_clock import StepClock
from worker_service.models.causal_model import CausalModel
from worker_service.session.session import ScheduledChunk, SequenceState
from worker_service.session.step import ModelOutput, SampleLogprobs, SchedulerOutput

_LOGPROB_ROWS = 256
"""Maximum number of rows of a prompt whose logits are in memory at one time. 2,048 rows of 49,152 float32 logits would
need 400 MB.
"""


def _choosers(chunk: ScheduledChunk) -> list[SequenceState]:
    """The states of a sequence with which its next tokens are sampled: without drafts, with the first draft, with the
    first two drafts, …

    Each state contains all tokens on which the sampled token depends.
    """
    sequence, drafts = chunk.sequence, chunk.drafts
    drafted = [replace(sequence, token_ids=sequence.token_ids + drafts[: n + 1]) for n in range(len(drafts))]
    return [sequence, *drafted]


class Runner:
    """The interface of runners, which compute steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def runs_ahead(self) -> bool:
        """Whether this runner can launch steps before the previous step has finished. The method `follow` decides about
        a given step.
        """
        return False

    def follow(self, chunks: Sequence[ScheduledChunk]) -> bool:  # noqa: ARG002 (used by `ModelRunner`)
        """Whether a step with these chunks may be launched before the host has read the tokens that the previous step
        sampled.
        """
        return False

    def launch(
        self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk], before: RunningStep | None = None
    ) -> RunningStep:
        """Launch the work of a step on the device, without waiting for the result.

        chunks: the chunks that the session returned for `output`. before: the previous step, if it has not finished. If
        `before` is given, `follow` must be true for the chunks.
        """
        raise NotImplementedError

    def execute(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        """Launch a step and wait for its results."""
        return self.launch(output, chunks).finish()

    def recover(self) -> None:
        """Free the device memory that a failed step has allocated. The caller must have dropped all references to
        tensors of the failed step.

        Raises DeviceLostError if this process can no longer use the GPU: after an illegal memory access or a failed
        assertion in a kernel, every further CUDA call fails.
        """
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(str(error).partition("\n")[0]) from None


class ModelRunner(Runner):
    """Computes steps with a decoder and its KV cache. The class is not thread-safe, because one thread owns the device.

    `launch` waits for the device only if log-probabilities of a prompt are requested. `RunningStep.finish` waits for
    the results.
    """

    def __init__(
        self,
        model: CausalModel,
        cache_engine: CacheEngine,
        decode_graphs: DecodeGraphs | None = None,
        forms: Forms | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self._forms = forms
        self.cache_engine = cache_engine
        self._decode_graphs = decode_graphs
        super().__init__(cache_engine.device_blocks.device)

    @property
    def runs_ahead(self) -> bool:
        """Whether the runner has CUDA graphs, without which steps are not launched ahead. See `Runner`."""
        return self._decode_graphs is not None

    def follow(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a CUDA graph can compute a step with these chunks, see `Runner`."""
        return self._decode_graphs is not None and self._decode_graphs.fit(chunks)

    @torch.inference_mode()
    def launch(
        self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk], before: RunningStep | None = None
    ) -> RunningStep:
        """Launch a step, see `Runner`."""
        clock = StepClock(self.device)
        self.cache_engine.move(output)
        clock.mark()
        chunks = self._encode(chunks)
        if not chunks:
            clock.mark()
            return RunningStep(chunks, clock, torch.empty(0), torch.empty(0, dtype=torch.int64), [], set())
        masks = self._begin_forms(chunks)
        hidden, query_start = self._forward(chunks, before)
        rows = [
            row
            for stop, chunk in zip(query_start[1:], chunks, strict=True)
            if chunk.chooses
            for row in range(stop - 1 - len(chunk.drafts), stop)
        ]
        sampling = hidden if len(rows) == len(hidden) else hidden[upload(rows, torch.int64, self.device)]
        logits = self.model.compute_logits(sampling)
        clock.mark()
        prompt_logprobs: list[SampleLogprobs] = []
        failed: set[int] = set()
        for chunk, start, stop in zip(chunks, query_start, query_start[1:], strict=False):
            try:
                prompt_logprobs += self._prompt_logprobs(chunk, hidden[start:stop])
            except FloatingPointError:
                failed.add(chunk.sequence.sequence_id)
        token_ids = torch.empty(0, dtype=torch.int64)
        if rows:
            choosers = [chooser for chunk in chunks if chunk.chooses for chooser in _choosers(chunk)]
            reports = any(chooser.sampling.logprobs is not None for chooser in choosers)
            token_ids = sample(logits, choosers, masks, may_edit=not reports)
        vectors = self._pool(chunks, query_start, hidden)
        return RunningStep(chunks, clock, logits, token_ids, prompt_logprobs, failed, vectors, masks)

    def _encode(self, chunks: Sequence[ScheduledChunk]) -> Sequence[ScheduledChunk]:
        """Compute the step's encoder inputs, if the model has an encoder. Returns the chunks that are no encoder
        inputs.
        """
        return chunks

    def _begin_forms(self, chunks: Sequence[ScheduledChunk]) -> FormMasks | None:
        if self._forms is not None:
            return self._forms.begin(chunks)
        if any(chunk.sequence.sampling.form for chunk in chunks):
            raise InvalidStepError("a sequence has a form, and this worker follows none")
        return None

    def _forward(self, chunks: Sequence[ScheduledChunk], before: RunningStep | None) -> tuple[Tensor, Sequence[int]]:
        """Compute the forward pass. Returns the hidden states, and the first row of each chunk followed by the number
        of rows.
        """
        adapter_slots = None if self.adapters is None else self.adapters.slots(chunks)
        if self._decode_graphs is not None and (before is not None or self._decode_graphs.fit(chunks)):
            unseen = None if before is None else before.unseen_tokens()
            hidden = self._decode_graphs.forward(chunks, unseen, adapter_slots)
            return hidden, list(accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0))
        assert before is None
        cache = self.cache_engine.device_blocks
        batch = build_batch(chunks, cache.shape[3], self.device)
        return self.model.forward(
            batch.token_ids, batch.positions, batch.slots, batch.attention, cache, adapter_slots
        ), batch.query_start

    def _pool(
        self, chunks: Sequence[ScheduledChunk], query_start: Sequence[int], hidden: Tensor
    ) -> list[tuple[ScheduledChunk, Tensor]]:
        """The vectors that are complete after this step, each with its chunk. hidden, query_start: results of
        `_forward`.
        """
        return pool_all(chunks, query_start, hidden)

    def _prompt_logprobs(self, chunk: ScheduledChunk, hidden: Tensor) -> list[SampleLogprobs]:
        """The log-probabilities of the prompt tokens that the rows of a chunk predict, from the chunk's second token to
        the token after the chunk.

        hidden: the chunk's hidden states, [chunk's tokens, hidden_size]. Returns one report, or an empty list if the
        request asks for no log-probabilities. Raises FloatingPointError if log-probabilities cannot be computed,
        because logits are not finite.
        """
        num_top = chunk.sequence.sampling.prompt_logprobs
        first, last = chunk.start + 1, min(chunk.stop + 1, chunk.sequence.num_prompt_tokens)
        if num_top is None or first >= last:
            return []
        token_ids = upload(chunk.sequence.token_ids[first:last], torch.int64, self.device)
        rows = torch.split(hidden[: len(token_ids)], _LOGPROB_ROWS)
        parts = []
        for part, tokens in zip(rows, torch.split(token_ids, _LOGPROB_ROWS), strict=True):
            logits = self.model.compute_logits(part)
            check_finite(logits)
            parts.append(gather_logprobs(logits, tokens, chunk.sequence.sequence_id, num_top))
        return [concatenate(parts)]
