"""Pools the hidden states of prompts into vectors, a chunk at a time.

Partial sums are in `SequenceState.pooled`. Sums are float64: other chunks change at most the last two bits of a mean.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from worker_service.errors import InvalidStepError
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import PoolingParams, PoolingType, SequenceVectors

Classify = Callable[[Tensor], Tensor]
"""A classifier: hidden states, [tokens, hidden_size], to scores, [classes]."""


def pool_all(
    chunks: Sequence[ScheduledChunk], query_start: Sequence[int], hidden: Tensor, classify: Classify | None = None
) -> list[tuple[ScheduledChunk, Tensor]]:
    """Pool a step's hidden states, [rows, hidden_size]. Returns the chunks that complete vectors, each with its
    vectors.

    query_start: the first row of each chunk."""
    completed = []
    for chunk, start, stop in zip(chunks, query_start, query_start[1:], strict=False):
        if chunk.sequence.sampling.pooling is not None:
            vectors = pool(chunk, hidden[start:stop], classify)
            if vectors is not None:
                completed.append((chunk, vectors))
    return completed


def pool(chunk: ScheduledChunk, hidden: Tensor, classify: Classify | None = None) -> Tensor | None:
    """Pool a chunk's hidden states, [chunk's tokens, hidden_size]. Returns the completed vectors, [vectors,
    dimensions], or None.

    Raises InvalidStepError if this worker has not computed the earlier hidden states."""
    sequence = chunk.sequence
    pooling = sequence.sampling.pooling
    assert pooling is not None
    if chunk.start and sequence.pooled is None and pooling.type not in (PoolingType.LAST, PoolingType.ALL):
        raise InvalidStepError(f"sequence {sequence.sequence_id} is pooled, and some of its states are missing")
    vectors: Tensor | None = None
    match pooling.type:
        case PoolingType.ALL:
            vectors = hidden
        case PoolingType.LAST:
            vectors = hidden[-1:]
        case PoolingType.CLS:
            vectors = hidden[:1] if sequence.pooled is None else _kept(chunk)
            sequence.pooled = vectors.clone()
        case PoolingType.MEAN:
            total = hidden.sum(0, keepdim=True, dtype=torch.float64)
            if sequence.pooled is not None:
                total += _kept(chunk)
            sequence.pooled = total
            vectors = total / chunk.stop
        case PoolingType.SCORE:
            assert classify is not None  # codec.py refuses scores without a classifier
            vectors = classify(hidden)[None]
        case PoolingType.ALIGNMENT:
            raise AssertionError("an Aligner takes these")  # `Aligner` pools this type
    if not chunk.samples and pooling.type is not PoolingType.ALL:
        return None
    return finished(vectors, pooling)


def finished(vectors: Tensor, pooling: PoolingParams) -> Tensor:
    """Cut vectors, [vectors, numbers], to the requested dimensions, as float32, and scale them to length 1 if
    requested."""
    # A copy, because a CUDA graph overwrites its hidden states in every step.
    cut = vectors[:, : pooling.dimensions].to(torch.float32, copy=True)
    return functional.normalize(cut, dim=1) if pooling.normalize else cut


def encode(sequence_id: int, vectors: Tensor, pooling: PoolingParams) -> SequenceVectors | None:
    """Vectors as float16 or float32 bytes in host memory. Returns None if a number is not finite in this type."""
    numbers = vectors.to("cpu", torch.float16 if pooling.half else torch.float32)
    if not numbers.isfinite().all():
        return None
    array = numbers.numpy()
    return SequenceVectors(sequence_id, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())


def _kept(chunk: ScheduledChunk) -> Tensor:
    kept = chunk.sequence.pooled
    assert isinstance(kept, Tensor)
    return kept
