"""Turns a step's chunks into the flat tensors of a forward pass. Each token of the step is one row, in the order of the
chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.upload import upload
from worker_service.session.session import ScheduledChunk


@dataclass(frozen=True)
class Batch:
    """The input tensors of one forward pass."""

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64. The position of each token in its sequence."""
    slots: Tensor
    """[num_tokens] int64. The slot of the KV cache in which each token's keys and values are stored."""
    attention: AttentionMetadata
    query_start: tuple[int, ...]
    """The number of the first row of each chunk, followed by the total number of rows."""


def build_batch(chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device) -> Batch:
    """Build the input tensors for one or more chunks. Each tensor is built in host memory and copied to the device as a
    whole.
    """
    starts = np.array([chunk.start for chunk in chunks])
    stops = np.array([chunk.stop for chunk in chunks])
    query_lens = stops - starts
    query_start = np.concatenate(([0], np.cumsum(query_lens)))
    sequence = np.repeat(np.arange(len(chunks)), query_lens)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[sequence]

    num_blocks = -(-stops // block_size)
    block_tables = np.zeros((len(chunks), num_blocks.max()), dtype=np.int64)
    token_ids = np.empty(query_start[-1], dtype=np.int64)
    for row, chunk in enumerate(chunks):
        block_tables[row, : num_blocks[row]] = chunk.sequence.block_ids[: num_blocks[row]]
        token_ids[query_start[row] : query_start[row + 1]] = chunk.token_ids

    slots = block_tables[sequence, positions // block_size] * block_size + positions % block_size
    return Batch(
        token_ids=upload(token_ids, torch.int64, device),
        positions=upload(positions, torch.int64, device),
        slots=upload(slots, torch.int64, device),
        attention=AttentionMetadata.build(query_lens.tolist(), stops.tolist(), torch.from_numpy(block_tables), device),
        query_start=tuple(query_start.tolist()),
    )
