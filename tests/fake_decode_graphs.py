"""CUDA graphs without a GPU: every replay computes the recorded function again, over the same memory.

Steps therefore run ahead of answers as on a GPU, with tokens that the host has not read yet.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kernels.inputs import AttentionMetadata
from worker_service.execution.steps.decode_graphs import DecodeGraphs, keys_of
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.models.causal_model import CausalModel, GroupedCache
from worker_service.session.step import Limits

MAX_NUM_ROWS = 64
"""Rows of the largest graph."""


class FakeGraphs:
    def __init__(self) -> None:
        self.replayed: list[int] = []
        """Rows of each replay, padding included."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        result = compute()

        def replay() -> None:
            result.copy_(compute())
            self.replayed.append(len(result))

        return replay, result


class WithoutPadding:
    """A network without padding rows, which eager torch would store; their states are NaN."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.config = model.config

    def forward(self, *inputs: Any) -> Tensor:
        token_ids, positions, slots, attention, cache, adapter_slots = inputs
        count = int((positions >= 0).sum())
        keys = keys_of(cache)
        # The networks' type in tests, where the cache has none.
        dtype = keys.dtype if keys.is_floating_point() else torch.float32
        hidden = torch.full((len(positions), self.config.hidden_size), torch.nan, dtype=dtype, device=keys.device)

        def without(metadata: AttentionMetadata) -> AttentionMetadata:
            return replace(
                metadata,
                query_start=metadata.query_start[: count + 1],
                context_lens=metadata.context_lens[:count],
                block_tables=metadata.block_tables[:count],
            )

        if count:
            if isinstance(cache, GroupedCache):
                slots, attention = [group[:count] for group in slots], [without(group) for group in attention]
            else:
                slots, attention = slots[:count], without(attention)
            adapter_slots = None if adapter_slots is None else adapter_slots[:count]
            hidden[:count] = self._model.forward(
                token_ids[:count], positions[:count], slots, attention, cache, adapter_slots
            )
        return hidden


def with_fake_graphs(
    runner: ModelRunner, limits: Limits, max_num_rows: int = MAX_NUM_ROWS, record: FakeGraphs | None = None
) -> ModelRunner:
    """A runner over the same model and cache, with fake graphs."""
    graphs = DecodeGraphs(
        cast(CausalModel, WithoutPadding(runner.model)),
        runner.cache_engine.cache,
        max(limits.max_num_seqs, max_num_rows),
        limits.max_model_len,
        has_adapters=runner.adapters is not None and runner.adapters.room.num_slots > 0,
        record=record or FakeGraphs(),
    )
    return ModelRunner(runner.model, runner.cache_engine, graphs, adapters=runner.adapters)
