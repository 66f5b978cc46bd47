"""Vectors from the states of prompts, a chunk at a time.

What is pooled over several chunks is kept with its sequence, so a swap loses nothing; a sequence that is computed again
begins anew. Sums are made in float64: a mean is the same to the last bit or two however its prompt was cut.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from worker_service.errors import InvalidStepError
from worker_service.session.session import ScheduledChunk
from worker_service.session.step import PoolingParams, PoolingType, SequenceVectors

Classify = Callable[[Tensor], Tensor]
"""From a text's states, [tokens, hidden_size], to [classes]."""


def pool_all(
    chunks: Sequence[ScheduledChunk], query_start: Sequence[int], hidden: Tensor, classify: Classify | None = None
) -> list[tuple[ScheduledChunk, Tensor]]:
    """What the chunks of a step complete. hidden: [rows, hidden_size], those of a chunk from its `query_start` on."""
    completed = []
    for chunk, start, stop in zip(chunks, query_start, query_start[1:], strict=False):
        if chunk.sequence.sampling.pooling is not None:
            vectors = pool(chunk, hidden[start:stop], classify)
            if vectors is not None:
                completed.append((chunk, vectors))
    return completed


def pool(chunk: ScheduledChunk, hidden: Tensor, classify: Classify | None = None) -> Tensor | None:
    """Take the states of a chunk in, [its tokens, hidden_size]; the vectors that it completes, [vectors, dimensions].

    None if it completes none. Raises InvalidStepError where states are missing that were not computed here.
    """
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
            assert classify is not None  # the limits say so
            vectors = classify(hidden)[None]
        case PoolingType.ALIGNMENT:
            raise AssertionError("an Aligner takes these")  # the session says so
    if not chunk.samples and pooling.type is not PoolingType.ALL:
        return None
    return finished(vectors, pooling)


def finished(vectors: Tensor, pooling: PoolingParams) -> Tensor:
    """Cut vectors, [vectors, numbers], to their dimensions, and make them 1 long if that is wanted: float32."""
    # A copy, because a captured graph writes its states to the same place in every step.
    cut = vectors[:, : pooling.dimensions].to(torch.float32, copy=True)
    return functional.normalize(cut, dim=1) if pooling.normalize else cut


def encode(sequence_id: int, vectors: Tensor, pooling: PoolingParams) -> SequenceVectors | None:
    """Read vectors off the device; None if a number of them is not finite, in the type that it is sent as."""
    numbers = vectors.to("cpu", torch.float16 if pooling.half else torch.float32)
    if not numbers.isfinite().all():
        return None
    array = numbers.numpy()
    return SequenceVectors(sequence_id, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())


def _kept(chunk: ScheduledChunk) -> Tensor:
    kept = chunk.sequence.pooled
    assert isinstance(kept, Tensor)
    return kept
