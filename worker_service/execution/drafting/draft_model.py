"""A proposer that drafts with a smaller model or a head, with the target's vocabulary and random numbers.

The draft cache has the target's block numbers, and blocks are moved in both caches, so the scheduler need not know the
draft model. While drafting does not pay, the draft model computes nothing. Before its next draft, the draft model
computes all missing tokens.

The target samples the token with the largest sum of logit and noise (`kernels.sampling.noise`). With the same noise,
drafts are right more often. Source: drafter-invariant speculative decoding (Daliri, Musco and Suresh 2024)."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.models.causal_model import AdapterPlace, Attention, Cache, CausalModel, GivenEmbeddings, Slots
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import BlockMapping, ModelOutput, SchedulerOutput
from worker_service.speculation.drafter import Beginning
from worker_service.speculation.policy import StepCost


class _Widened:
    """A draft model with logits cut or padded to the target's vocabulary size. Only the padding of the vocabularies may
    differ."""

    def __init__(self, model: CausalModel, vocabulary_size: int) -> None:
        self.config = model.config
        self.prompt_embeds_size = 0  # drafts are made from token ids alone
        self._model = model
        self._vocabulary_size = vocabulary_size

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        return self._model.allocate_adapters(num_slots, max_rank)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Slots,
        attention: Attention,
        cache: Cache,
        adapter_slots: Tensor | None = None,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        assert given is None
        known = token_ids.clamp(max=self.config.vocabulary_size - 1)
        return self._model.forward(known, positions, slots, attention, cache, adapter_slots)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)[:, : self._vocabulary_size]
        return torch.nn.functional.pad(logits, (0, self._vocabulary_size - logits.shape[1]), value=-torch.inf)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return self._model.checkpoint_tensors()

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        self._model.pack(quantization, quantized)


def with_vocabulary(model: CausalModel, vocabulary_size: int) -> CausalModel:
    return model if model.config.vocabulary_size == vocabulary_size else _Widened(model, vocabulary_size)


_NOTHING_TO_MOVE = SchedulerOutput(epoch=0, step_id=0)
_NO_SEQUENCE = -1
_FEW = 64
"""Maximum tokens of a pass whose duration is used to estimate drafting's cost. Longer passes compute prompts, and need
less time per token."""


class DraftRunner(Protocol):
    """Computes the forward passes of a draft model or of a head."""

    cache_engine: CacheEngine
    """The draft cache, with as many blocks as the target's cache."""

    def execute(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        """Compute cache slots [start, stop) of each chunk, and a draft for each chunk that samples."""


class DraftModel:
    """A proposer that runs a draft model or a head, used only by the device thread."""

    def __init__(
        self,
        runner: DraftRunner,
        max_model_len: int,
        max_num_batched_tokens: int,
        prefill_tokens_per_second: int,
        *,
        reads_next: bool = False,
    ) -> None:
        """reads_next: whether a token's keys and values also depend on the next token, as in a head. The last token of
        a sequence then has no slot yet."""
        cache = runner.cache_engine
        self.cost: StepCost | None = StepCost(1 / max(1, prefill_tokens_per_second))
        self._runner = runner
        self._reads_next = reads_next
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = cache.device_blocks.shape[3]
        # For each block, the number of leading slots that are valid for the target's tokens.
        self._filled = np.zeros(len(cache.device_blocks), dtype=np.int64)
        self._filled_on_host = np.zeros(len(cache.host_blocks), dtype=np.int64)
        # For each block, the sequence for which the target writes into it in the current step.
        self._writers = np.full(len(cache.device_blocks), _NO_SEQUENCE, dtype=np.int64)

    def most_behind(self, num_tokens: int) -> int:
        """Maximum drafts after `num_tokens` tokens. The last draft is not computed, and needs no position."""
        return max(0, self._max_model_len - num_tokens + 1)

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        """Repeat the step's moves of blocks in the draft cache, and invalidate slots that the target computes."""
        if output.moves_blocks:
            self._runner.cache_engine.move(output)
        _move(self._filled, self._filled_on_host, output.blocks_to_swap_out)
        _move(self._filled_on_host, self._filled, output.blocks_to_swap_in)
        _move(self._filled, self._filled, output.blocks_to_copy)
        # In a head's cache, a block's last slot depends on the next block's first token, which may differ in the copy.
        if self._reads_next:
            copied = [*output.blocks_to_copy.sources, *output.blocks_to_copy.destinations]
            self._filled[copied] = np.maximum(self._filled[copied] - 1, 0)
        self._writers[:] = _NO_SEQUENCE
        for chunk in chunks:
            first, last = chunk.start // self._block_size, (chunk.stop - 1) // self._block_size
            block_id, *others = chunk.sequence.block_ids[first : last + 1]
            self._filled[block_id] = min(self._filled[block_id], chunk.start % self._block_size)
            self._filled[others] = 0
            self._writers[chunk.sequence.block_ids[first : last + 1]] = chunk.sequence.sequence_id

    def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        """Draft tokens. The first pass computes all missing tokens, and each further pass one draft for each sequence.

        A pass has at most `max_num_batched_tokens` tokens; a sequence that does not fit into the first pass gets no
        drafts."""
        drafts: list[list[int]] = [[] for _ in beginnings]
        numbers = [self._room(one) for one in beginnings]
        rows, chunks = [], []
        left = self._max_num_batched_tokens
        for row, one in enumerate(beginnings):
            if one.num_tokens > self._max_model_len:
                continue
            if self._reads_next and self._awaits_states(one):
                continue
            num_slots = one.num_tokens - self._reads_next
            start = self._num_filled(one.sequence, num_slots)
            if self._reads_next and start and start % self._block_size == 0:
                # Another sequence may share this block, and may have computed the last slot for another next token.
                start -= 1
            if numbers[row]:
                start = min(start, num_slots - 1)
            stop = min(num_slots, start + left)
            if start < stop:
                left -= stop - start
                rows.append(row)
                samples = numbers[row] > 0 and stop == num_slots
                chunks.append(ScheduledChunk(_of_draft(one), start, stop, samples))
        is_first = True
        while chunks:
            found, failed = self._pass(chunks)
            if is_first:
                for chunk in chunks:
                    self._note(chunk)
                is_first = False
            going_on = []
            tokens = iter(found)
            for row, chunk in zip(rows, chunks, strict=True):
                if not chunk.samples:
                    continue
                token_id = next(tokens)
                if chunk.sequence.sequence_id in failed:
                    continue
                drafts[row].append(token_id)
                chunk.sequence.token_ids.append(token_id)
                if len(drafts[row]) < numbers[row]:
                    going_on.append((row, chunk._replace(start=chunk.stop, stop=chunk.stop + 1)))
            rows, chunks = [row for row, _ in going_on], [chunk for _, chunk in going_on]
        return drafts

    def _pass(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[int], set[int]]:
        """Compute one forward pass. Returns the drafts, and the ids of sequences for which sampling failed."""
        began = time.perf_counter()
        answer = self._runner.execute(_NOTHING_TO_MOVE, chunks)
        num_tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        if num_tokens <= max(_FEW, len(chunks)):
            assert self.cost is not None
            self.cost.observe(num_tokens, time.perf_counter() - began)
        return answer.token_ids, set(answer.failed_sequence_ids)

    def _room(self, one: Beginning) -> int:
        """The number of requested drafts for which the sequence has blocks and the draft model has positions. The last
        draft needs neither."""
        slots = min(len(one.sequence.block_ids) * self._block_size, self._max_model_len)
        return max(0, min(one.number, slots - one.num_tokens + 1))

    def _awaits_states(self, one: Beginning) -> bool:
        """Whether another sequence of this step still computes some of the sequence's first tokens. Without their
        hidden states, a head cannot draft."""
        writers = self._writers[one.sequence.block_ids[: (one.num_tokens - 1) // self._block_size]]
        return bool(((writers != _NO_SEQUENCE) & (writers != one.sequence.sequence_id)).any())

    def _num_filled(self, sequence: SequenceState, num_slots: int) -> int:
        """Number of leading slots that the draft model has computed."""
        firsts = np.arange(0, num_slots, self._block_size)
        filled = self._filled[sequence.block_ids[: len(firsts)]]
        (short,) = np.nonzero(filled < np.minimum(num_slots - firsts, self._block_size))
        return int(firsts[short[0]] + filled[short[0]]) if len(short) else num_slots

    def _note(self, chunk: ScheduledChunk) -> None:
        """Record that the slots of a chunk are computed."""
        firsts = np.arange(chunk.start // self._block_size * self._block_size, chunk.stop, self._block_size)
        blocks = chunk.sequence.block_ids[firsts[0] // self._block_size :][: len(firsts)]
        self._filled[blocks] = np.minimum(chunk.stop - firsts, self._block_size)


def _of_draft(one: Beginning) -> SequenceState:
    """A copy that ends after the first `num_tokens` tokens. Adapter, output form and items are left out: drafts
    are made from token ids alone."""
    sampling = one.sequence.sampling
    if sampling.form or sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        sampling = replace(sampling, form="", logprobs=None, prompt_logprobs=None)
    return replace(
        one.sequence,
        token_ids=one.sequence.token_ids[: one.num_tokens],
        sampling=sampling,
        adapter="",
        items=(),
    )


def _move(sources: npt.NDArray[np.int64], destinations: npt.NDArray[np.int64], mapping: BlockMapping) -> None:
    destinations[list(mapping.destinations)] = sources[list(mapping.sources)]
