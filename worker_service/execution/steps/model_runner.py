"""Computes the steps of a decoder: moves blocks, runs the model over the batch, and samples tokens. Logits are computed
only for rows that sample, and for prompts with log-probabilities."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.inputs import AttentionMetadata, upload
from worker_service.errors import DeviceLostError, InvalidStepError
from worker_service.execution.adapters.adapters import Adapters
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.images.axial_positions import axial_positions
from worker_service.execution.images.image_encoder import NONE_ENCODED, ImageEncoder
from worker_service.execution.sampling.form_masks import FormMasks
from worker_service.execution.sampling.forms import Forms
from worker_service.execution.sampling.logprobs import check_finite, concatenate, gather_logprobs
from worker_service.execution.sampling.pooling import pool_all
from worker_service.execution.sampling.sampler import sample
from worker_service.execution.steps.decode_graphs import DecodeGraphs
from worker_service.execution.steps.given_embeddings import given_embeddings, has_given
from worker_service.execution.steps.running_step import RunningStep, StepClock
from worker_service.models.causal_model import Attention, CausalModel, GroupedCache, Slots
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import ModelOutput, SampleLogprobs, SchedulerOutput

_LOGPROB_ROWS = 256
"""Rows of a prompt whose logits are in memory at one time. 2,048 rows of 49,152 float32 logits would need 400 MB."""


@dataclass(frozen=True)
class Batch:
    """The input tensors of one forward pass: one row for each token, in the order of the chunks."""

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """Positions in the sequences, [num_tokens] int64."""
    slots: Tensor
    """Slots of the KV cache, [num_tokens] int64."""
    attention: AttentionMetadata
    query_start: tuple[int, ...]
    """The first row of each chunk, followed by the number of rows."""
    further: Sequence[tuple[Tensor, AttentionMetadata]]
    """Slots and sequences in further groups of layers."""


def build_batch(
    chunks: Sequence[ScheduledChunk],
    block_size: int,
    device: torch.device,
    further_sizes: Sequence[int] = (),
    *,
    images_attend_both_ways: bool = False,
) -> Batch:
    """Build the tensors in host memory, and copy each to the device as a whole. At least one chunk is required.

    further_sizes: tokens of a block in further groups of layers. 0: the layers have states, in one block for each
    sequence."""
    starts = np.array([chunk.start for chunk in chunks])
    stops = np.array([chunk.stop for chunk in chunks])
    query_lens = stops - starts
    query_start = np.concatenate(([0], np.cumsum(query_lens)))
    sequence = np.repeat(np.arange(len(chunks)), query_lens)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[sequence]

    visible_ends = _visible_ends(chunks, positions, query_start) if images_attend_both_ways else None
    token_ids = np.empty(query_start[-1], dtype=np.int64)
    for row, chunk in enumerate(chunks):
        token_ids[query_start[row] : query_start[row + 1]] = chunk.token_ids

    def place(group: int, size: int) -> tuple[Tensor, AttentionMetadata]:
        num_blocks = -(-stops // size) if size else np.ones_like(stops)
        block_tables = np.zeros((len(chunks), num_blocks.max()), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            table = chunk.sequence.further_tables[group - 1] if group else chunk.sequence.block_ids
            block_tables[row, : num_blocks[row]] = table[: num_blocks[row]]
        slots = block_tables[sequence, positions // size] * size + positions % size if size else positions[:0]
        tables = torch.from_numpy(block_tables)
        metadata = AttentionMetadata.build(query_lens.tolist(), stops.tolist(), tables, device, visible_ends)
        return upload(slots, torch.int64, device), metadata

    slots, attention = place(0, block_size)
    return Batch(
        token_ids=upload(token_ids, torch.int64, device),
        positions=upload(positions, torch.int64, device),
        slots=slots,
        attention=attention,
        query_start=tuple(query_start.tolist()),
        further=[place(group, size) for group, size in enumerate(further_sizes, 1)],
    )


def _visible_ends(
    chunks: Sequence[ScheduledChunk], positions: npt.NDArray[np.int64], query_start: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """See `AttentionMetadata`. None if no chunk has tokens of an image."""
    ends = None
    for chunk, row in zip(chunks, query_start.tolist(), strict=False):
        for item, start, stop in chunk.parts_of_items() if chunk.sequence.items else ():
            if item.image is not None:
                ends = positions.copy() if ends is None else ends
                ends[row + start - chunk.start : row + stop - chunk.start] = item.stop - 1
    return ends


def _without_late(chunks: Sequence[ScheduledChunk], late: Set[int]) -> Sequence[ScheduledChunk]:
    """The chunks without the last tokens of late sequences. The scheduler sends these tokens again, and states must
    advance by them once."""
    if not late:
        return chunks
    shorter = (
        chunk._replace(stop=chunk.stop - 1, samples=False) if chunk.sequence.sequence_id in late else chunk
        for chunk in chunks
    )
    return [chunk for chunk in shorter if chunk.start < chunk.stop]


def _choosers(chunk: ScheduledChunk) -> list[SequenceState]:
    """The states with which a sequence's next tokens are sampled: without drafts, with one draft, with two, …"""
    sequence, drafts = chunk.sequence, chunk.drafts
    drafted = [replace(sequence, token_ids=sequence.token_ids + drafts[: n + 1]) for n in range(len(drafts))]
    return [sequence, *drafted]


class Runner:
    """The interface of runners, which compute steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.images: ImageEncoder | None = None
        """None if prompts cannot contain images."""

    @property
    def runs_ahead(self) -> bool:
        """Whether steps may be launched before the previous step has finished, if `follow` agrees."""
        return False

    def follow(self, chunks: Sequence[ScheduledChunk]) -> bool:  # noqa: ARG002 (used by `ModelRunner`)
        """Whether a step may be launched before the host has read the previous step's tokens."""
        return False

    def launch(
        self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk], before: RunningStep | None = None
    ) -> RunningStep:
        """Launch a step without waiting for the result.

        chunks: the session's result for `output`. before: the previous step, if it has not finished; `follow` must be
        true."""
        raise NotImplementedError

    def execute(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        return self.launch(output, chunks).finish()

    def recover(self) -> None:
        """Free the memory of a failed step, after all references to its tensors are dropped.

        Raises DeviceLostError if the process can no longer use the GPU: after an illegal memory access or a failed
        assertion in a kernel, every CUDA call fails."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(str(error).partition("\n")[0]) from None


class ModelRunner(Runner):
    """Computes steps with a decoder and its KV cache. Not thread-safe. `launch` waits for the device only for
    log-probabilities of a prompt."""

    def __init__(
        self,
        model: CausalModel,
        cache_engine: CacheEngine,
        decode_graphs: DecodeGraphs | None = None,
        forms: Forms | None = None,
        adapters: Adapters | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        """images: required if prompts contain images."""
        self.model = model
        self.adapters = adapters
        self._forms = forms
        self.cache_engine = cache_engine
        self._decode_graphs = decode_graphs
        cache = cache_engine.cache
        self._keeps_states = isinstance(cache, GroupedCache) and 0 in cache.block_sizes
        super().__init__(cache_engine.device_blocks.device)
        self.images = images

    @property
    def runs_ahead(self) -> bool:
        return self._decode_graphs is not None

    def follow(self, chunks: Sequence[ScheduledChunk]) -> bool:
        return self._decode_graphs is not None and self._decode_graphs.fit(chunks) and not has_given(chunks)

    @torch.inference_mode()
    def launch(
        self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk], before: RunningStep | None = None
    ) -> RunningStep:
        encoded = NONE_ENCODED if self.images is None else self.images.encode(output)
        clock = StepClock(self.device)
        if output.moves_blocks:
            self.cache_engine.move(output)
        clock.mark()
        scheduled = self._encode(chunks)
        masks = self._begin_forms(scheduled)
        # Masks are computed during the forward pass, but models with states wait for them: see `_without_late`.
        late: Set[int] = masks.late() if masks is not None and self._keeps_states else frozenset()
        chunks = _without_late(scheduled, late)
        if not chunks:
            clock.mark()
            no_tokens = torch.empty(0, dtype=torch.int64)
            return RunningStep(scheduled, clock, torch.empty(0), no_tokens, [], set(), late=late, encoded=encoded)
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
        pools = any(chunk.sequence.sampling.pooling for chunk in chunks)
        vectors = self._pool(chunks, query_start, hidden) if pools else []
        return RunningStep(scheduled, clock, logits, token_ids, prompt_logprobs, failed, vectors, masks, late, encoded)

    def _encode(self, chunks: Sequence[ScheduledChunk]) -> Sequence[ScheduledChunk]:
        """Compute the step's encoder inputs. Returns the other chunks."""
        return chunks

    def _begin_forms(self, chunks: Sequence[ScheduledChunk]) -> FormMasks | None:
        formed = [chunk for chunk in chunks if chunk.sequence.sampling.form]
        if not formed:
            return None
        if self._forms is None:
            raise InvalidStepError("a sequence has a form, and this worker supports none")
        return self._forms.begin(formed)

    def _adapter_slots(self, chunks: Sequence[ScheduledChunk]) -> Tensor | None:
        if self.adapters is None or not any(chunk.sequence.adapter for chunk in chunks):
            return None
        return self.adapters.slots(chunks)

    def _forward(self, chunks: Sequence[ScheduledChunk], before: RunningStep | None) -> tuple[Tensor, Sequence[int]]:
        """Returns the hidden states, and the first row of each chunk followed by the number of rows."""
        adapter_slots = self._adapter_slots(chunks)
        if self._decode_graphs is not None and (before is not None or self.follow(chunks)):
            unseen = None if before is None else before.unseen_tokens()
            hidden = self._decode_graphs.forward(chunks, unseen, adapter_slots)
            return hidden, list(accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0))
        assert before is None
        cache = self.cache_engine.cache
        block_size, *further = cache.block_sizes if isinstance(cache, GroupedCache) else (cache.shape[3],)
        both_ways = self.images is not None and self.images.attends_both_ways
        batch = build_batch(chunks, block_size, self.device, further, images_attend_both_ways=both_ways)
        slots: Slots = batch.slots
        attention: Attention = batch.attention
        if isinstance(cache, GroupedCache):
            slots, attention = zip((slots, attention), *batch.further, strict=True)
        given = given_embeddings(chunks, batch.query_start, self.device, self.model.config.hidden_size, self.images)
        positions = None if self.images is None else axial_positions(chunks)
        return self.model.forward(
            batch.token_ids,
            batch.positions if positions is None else upload(positions, torch.int64, self.device),
            slots,
            attention,
            cache,
            adapter_slots,
            given,
        ), batch.query_start

    def _pool(
        self, chunks: Sequence[ScheduledChunk], query_start: Sequence[int], hidden: Tensor
    ) -> list[tuple[ScheduledChunk, Tensor]]:
        """The completed vectors, each with its chunk."""
        return pool_all(chunks, query_start, hidden)

    def _prompt_logprobs(self, chunk: ScheduledChunk, hidden: Tensor) -> list[SampleLogprobs]:
        """One report of the prompt tokens that a chunk's rows predict, or an empty list without a request for it.

        hidden: [chunk's tokens, hidden_size]. Raises FloatingPointError if logits are not finite."""
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
