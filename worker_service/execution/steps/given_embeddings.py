"""The rows of a step whose embeddings requests have given in place of token ids."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from kernels.inputs import upload
from worker_service.models.causal_model import GivenEmbeddings
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import Embeddings

_STOP = attrgetter("stop")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def has_given(chunks: Sequence[ScheduledChunk]) -> bool:
    return any(True for chunk in chunks if chunk.sequence.items for _ in _parts(chunk))


def given_embeddings(
    chunks: Sequence[ScheduledChunk], query_start: Sequence[int], device: torch.device
) -> GivenEmbeddings | None:
    """query_start: the first row of each chunk. Returns None if all rows have token ids."""
    rows: list[int] = []
    parts: list[Tensor] = []
    for chunk, first_row in zip(chunks, query_start, strict=False):
        for embeddings, item_start, start, stop in _parts(chunk):
            rows += range(first_row + start - chunk.start, first_row + stop - chunk.start)
            parts.append(_read(embeddings, start - item_start, stop - item_start))
    if not rows:
        return None
    return GivenEmbeddings(upload(rows, torch.int64, device), torch.cat(parts).to(device))


def _parts(chunk: ScheduledChunk) -> Iterator[tuple[Embeddings, int, int, int]]:
    """The embeddings of a chunk: each item's embeddings and first token, and the chunk's tokens [start, stop) in it."""
    items = chunk.sequence.items
    for place in range(bisect_right(items, chunk.start, key=_STOP), len(items)):
        item = items[place]
        if item.start >= chunk.stop:
            break
        start, stop = max(chunk.start, item.start), min(chunk.stop, item.stop)
        assert item.embeddings is not None
        yield item.embeddings, item.start, start, stop


def _read(embeddings: Embeddings, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of embeddings. Returns [rows, size] float32."""
    size = embeddings.row_bytes
    content = bytearray(embeddings.data[start * size : stop * size])
    return torch.frombuffer(content, dtype=_DTYPES[embeddings.dtype]).view(stop - start, -1).float()
