"""The rows of a step whose embeddings are given in place of token ids: by requests, or as images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.inputs import upload
from worker_service.execution.images.image_encoder import ImageEncoder
from worker_service.models.causal_model import GivenEmbeddings
from worker_service.session.items import Embeddings
from worker_service.session.sequence_state import ScheduledChunk

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def has_given(chunks: Sequence[ScheduledChunk]) -> bool:
    return any(True for chunk in chunks if chunk.sequence.items for _ in chunk.parts_of_items())


def given_embeddings(
    chunks: Sequence[ScheduledChunk],
    query_start: Sequence[int],
    device: torch.device,
    hidden_size: int,
    images: ImageEncoder | None,
) -> GivenEmbeddings | None:
    """query_start: the first row of each chunk. images: required if a chunk has images. Returns None if all rows have
    token ids."""
    rows: list[int] = []
    parts: list[Tensor] = []
    deep_rows: list[int] = []
    deep_parts: list[Sequence[Tensor]] = []
    for chunk, first_row in zip(chunks, query_start, strict=False):
        for item, start, stop in chunk.parts_of_items() if chunk.sequence.items else ():
            behind = first_row - chunk.start
            if item.image is None:
                assert item.embeddings is not None
                rows += range(start + behind, stop + behind)
                parts.append(_read(item.embeddings, start - item.start, stop - item.start))
                continue
            assert images is not None
            places, found = images.within(chunk.sequence, item, start, stop)
            replaced: list[int] = (places + behind).tolist()
            rows += replaced
            if found is None:
                # Whatever reads these rows fails, also later from the prefix cache.
                parts.append(torch.full((len(replaced), hidden_size), torch.nan))
                continue
            parts.append(found.embeddings.float())
            if found.deep:
                deep_rows += replaced
                deep_parts.append(found.deep)
    if not rows:
        return None
    given = GivenEmbeddings(upload(rows, torch.int64, device), torch.cat([part.to(device) for part in parts]))
    if not deep_rows:
        return given
    deep = [torch.cat(layer).float() for layer in zip(*deep_parts, strict=True)]
    return given._replace(deep_rows=upload(deep_rows, torch.int64, device), deep=deep)


def _read(embeddings: Embeddings, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of embeddings. Returns [rows, size] float32."""
    size = embeddings.row_bytes
    content = bytearray(embeddings.data[start * size : stop * size])
    return torch.frombuffer(content, dtype=_DTYPES[embeddings.dtype]).view(stop - start, -1).float()
