"""A native network over caches of its own, without a worker: keys and values in blocks of 4 tokens, and states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.inputs import AttentionMetadata
from worker_service.models.causal_model import GroupedCache, LayerCache
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.layer_needs import LayerKeys, LayerStates, needs_of

CPU = torch.device("cpu")
NAN = float("nan")
BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 4, 40, 13


class NetworkWithStates:
    """Blocks are NaN where nothing was stored. A sequence's number is also its block of states."""

    def __init__(self, model: Decoder, dtype: torch.dtype = torch.float32) -> None:
        """model: with weights, packed."""
        self._model = model
        self.layers: list[LayerCache] = []
        for needs in needs_of(model.config, model.config.num_kv_heads):
            if isinstance(needs, LayerStates):
                pool = torch.full((NUM_BLOCKS, needs.num_bytes(dtype)), 255, dtype=torch.uint8)
                self.layers.append(LayerCache(needs.view(pool, dtype), 1))
            else:
                assert isinstance(needs, LayerKeys)
                shape = (NUM_BLOCKS, needs.parts, BLOCK_SIZE, needs.num_kv_heads, needs.head_dim)
                self.layers.append(LayerCache(torch.full(shape, NAN, dtype=dtype), 0))

    def __call__(self, *chunks: tuple[int, Sequence[int], int]) -> list[Tensor]:
        """Logits of each (sequence, tokens, context before them)."""
        lens = [len(tokens) for _, tokens, _ in chunks]
        contexts = [before + len(tokens) for _, tokens, before in chunks]
        tables = torch.tensor([[number * MAX_BLOCKS + block for block in range(MAX_BLOCKS)] for number, *_ in chunks])
        positions = torch.cat([torch.arange(before, before + len(tokens)) for _, tokens, before in chunks])
        rows = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lens))
        slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        blocks = torch.tensor([[number] for number, *_ in chunks])
        with torch.inference_mode():
            hidden = self._model.forward(
                torch.tensor([token for _, tokens, _ in chunks for token in tokens]),
                positions,
                [slots, slots[:0]],
                [AttentionMetadata.build(lens, contexts, table, CPU) for table in (tables, blocks)],
                GroupedCache(self.layers, [BLOCK_SIZE, 0]),
            )
            return [*torch.split(self._model.compute_logits(hidden), lens)]
