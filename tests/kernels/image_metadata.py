"""Metadata of steps with images whose tokens attend to each other in both directions."""

from dataclasses import replace

import torch

from kernels.inputs import AttentionMetadata, upload


def with_images(metadata: AttentionMetadata, images: list[tuple[int, int, int]]) -> AttentionMetadata:
    """images: a sequence and positions [start, stop) of it, whose tokens attend to each other in both directions."""
    starts, lens = metadata.query_start.tolist(), metadata.context_lens.tolist()
    ends = [end for first, stop, length in zip(starts, starts[1:], lens, strict=False)
            for end in range(length - stop + first, length)]  # fmt: skip
    for sequence, start, stop in images:
        row = starts[sequence + 1] - lens[sequence]  # of the sequence's first token
        for position in range(max(start, starts[sequence] - row), stop):
            ends[row + position] = stop - 1
    return replace(metadata, visible_ends=upload(ends, torch.int32, metadata.context_lens.device))
