"""A step that has been launched on the device, and whose results have not been read yet."""

import time
from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from worker_service.execution.images.image_encoder import NONE_ENCODED, Encoded
from worker_service.execution.sampling.form_masks import FormMasks
from worker_service.execution.sampling.logprobs import sample_logprobs
from worker_service.execution.sampling.pooling import encode
from worker_service.execution.sampling.sampler import BARRED
from worker_service.execution.steps.decode_inputs import UnseenTokens
from worker_service.session.sequence_state import PLACEHOLDER, ScheduledChunk
from worker_service.session.step import ModelOutput, SampleLogprobs, SequenceVectors, StepTiming


class StepClock:
    """Measures one step with marks between its parts, which are CUDA events on a GPU. Only reading waits for the
    device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[int] = []
        self.mark()

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter_ns() // 1000)

    def has_stopped(self) -> bool:
        """Whether the device has reached the last mark."""
        return not self._is_cuda or bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def durations(self) -> list[int]:
        """The durations of the parts in microseconds. Waits until the device has reached the last mark."""
        if not self._is_cuda:
            return [later - earlier for earlier, later in pairwise(self._times)]
        self._events[-1].synchronize()
        return [round(1e3 * earlier.elapsed_time(later)) for earlier, later in pairwise(self._events)]


class RunningStep:
    """A step that the device is computing. `finish` waits for the results and reads them."""

    def __init__(
        self,
        chunks: Sequence[ScheduledChunk],
        clock: StepClock,
        logits: Tensor,
        token_ids: Tensor,
        prompt_logprobs: list[SampleLogprobs],
        failed: Set[int],
        vectors: Sequence[tuple[ScheduledChunk, Tensor]] = (),
        masks: FormMasks | None = None,
        late: Set[int] = frozenset(),
        encoded: Encoded = NONE_ENCODED,
    ) -> None:
        """Start to copy the sampled tokens to the host.

        logits: [rows, vocabulary_size]. token_ids: [rows] int64. A chunk that `chooses` has a row for its last token
        and for each draft. failed: sequences without finite prompt log-probabilities. vectors: completed vectors with
        their chunks. late: sequences whose last tokens are not computed; they have no rows.
        encoded: the images that the step encoded."""
        self.chunks = chunks
        self._sampling = [chunk for chunk in chunks if chunk.samples]
        self._vectors = vectors
        self._masks = masks
        self._late = late
        self._encoded = encoded
        self._num_rows = [self._num_choices(chunk) for chunk in self._sampling]
        self._sequences = [
            chunk.sequence for chunk, count in zip(self._sampling, self._num_rows, strict=True) for _ in range(count)
        ]
        self._clock = clock
        self._logits = logits if any(sequence.sampling.logprobs is not None for sequence in self._sequences) else None
        self._token_ids = token_ids
        self._host_token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=token_ids.is_cuda)
        self._host_token_ids.copy_(token_ids, non_blocking=True)
        self._prompt_logprobs = prompt_logprobs
        self._failed = failed
        clock.mark()

    def is_done(self) -> bool:
        """Whether `finish` would return without waiting."""
        return self._clock.has_stopped()

    def unseen_tokens(self) -> UnseenTokens:
        """The sampled tokens on the device, for a step that is launched before the host has read them."""
        return UnseenTokens(
            self._token_ids, {sequence.sequence_id: row for row, sequence in enumerate(self._sequences)}
        )

    @torch.inference_mode()
    def finish(self) -> ModelOutput:
        durations = self._clock.durations()
        found = self._host_token_ids.tolist()
        logits, self._logits = self._logits, None
        numbers = self._num_rows
        rows_of = [range(stop - number, stop) for stop, number in zip(accumulate(numbers), numbers, strict=True)]
        late = self._late if self._masks is None else self._masks.late()
        shares = [
            []
            if chunk.sequence.sequence_id in late
            else accepted(found[rows.start : rows.stop], chunk.drafts)
            if rows
            else [PLACEHOLDER]
            for chunk, rows in zip(self._sampling, rows_of, strict=True)
        ]
        vectors, without = self._read_vectors()
        failed = (
            self._failed
            | without
            | {
                chunk.sequence.sequence_id
                for chunk, share in zip(self._sampling, shares, strict=True)
                if share and share[0] < 0
            }
        )
        reporting = [
            (chunk.sequence, rows[: len(share)])
            for chunk, rows, share in zip(self._sampling, rows_of, shares, strict=True)
            if share and chunk.sequence.sampling.logprobs is not None and chunk.sequence.sequence_id not in failed
        ]
        barred = []
        for chunk, share in zip(self._sampling, shares, strict=True):
            if share[:1] == [BARRED] and chunk.sequence.sequence_id not in self._failed:
                barred.append(chunk.sequence.sequence_id)
            if chunk.sequence.sequence_id in failed:
                share[:] = [PLACEHOLDER]
        has_drafts = any(chunk.drafts for chunk in self._sampling)
        return ModelOutput(
            token_ids=[token_id for share in shares for token_id in share],
            num_tokens=[len(share) for share in shares] if has_drafts or late else [],
            num_draft_tokens=[len(chunk.drafts) for chunk in self._sampling] if has_drafts else [],
            timing=replace(StepTiming(*durations), encode_us=self._encoded.encode_us),
            logprobs=[] if logits is None else sample_logprobs(logits, found, reporting),
            prompt_logprobs=self._prompt_logprobs,
            failed_sequence_ids=[
                chunk.sequence.sequence_id for chunk in self.chunks if chunk.sequence.sequence_id in failed
            ],
            barred_sequence_ids=barred,
            vectors=vectors,
            failed_items=[*self._encoded.failed],
            prepared_items=[*self._encoded.prepared],
        )

    def _num_choices(self, chunk: ScheduledChunk) -> int:
        """Rows of logits of a chunk: one for the last token and one for each draft, or none."""
        return 1 + len(chunk.drafts) if chunk.chooses and chunk.sequence.sequence_id not in self._late else 0

    def _read_vectors(self) -> tuple[list[SequenceVectors], set[int]]:
        """The step's vectors as bytes, and the ids of sequences whose vectors are not finite."""
        found, without = [], set()
        for chunk, tensor in self._vectors:
            pooling = chunk.sequence.sampling.pooling
            assert pooling is not None
            vectors = encode(chunk.sequence.sequence_id, tensor, pooling)
            if vectors is None:
                without.add(chunk.sequence.sequence_id)
            else:
                found.append(vectors)
        self._vectors = ()
        return found, without


def accepted(found: list[int], drafts: Sequence[int]) -> list[int]:
    """The sampled tokens up to and including the first that differs from its draft.

    found: the tokens sampled after the last known token and after each draft. A token depends only on the tokens before
    it, so drafts never change an output."""
    gained = found[:1]
    for draft, token_id in zip(drafts, found[1:], strict=True):
        if gained[-1] != draft or token_id < 0:
            break
        gained.append(token_id)
    return gained
