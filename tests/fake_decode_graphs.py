"""CUDA graphs without a GPU: a computation that is recorded is computed anew, over the same memory, by every replay.

Steps therefore run ahead of answers on a CPU as they do on a GPU, where tokens that the host has not read yet pass from
one step to the next.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from worker_service.execution.steps.decode_graphs import DecodeGraphs
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.models.causal_model import CausalModel
from worker_service.session.step import Limits

MAX_NUM_ROWS = 64
"""Of the largest graph."""


class FakeGraphs:
    """In the place of what captures them."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        """The number of rows, padding included, of each replay."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        result = compute()

        def replay() -> None:
            result.copy_(compute())
            self.replayed.append(len(result))

        return replay, result


class WithoutPadding:
    """A network that leaves padding rows out, which eager torch would store somewhere; their states are NaN."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.config = model.config

    def forward(self, *inputs: Any) -> Tensor:
        """As `CausalModel` has it."""
        token_ids, positions, slots, attention, cache, adapter_slots = inputs
        count = int((slots >= 0).sum())
        # Of the type that the networks of tests compute in, where that of the cache is none.
        dtype = cache.dtype if cache.is_floating_point() else torch.float32
        hidden = torch.full((len(slots), self.config.hidden_size), torch.nan, dtype=dtype, device=cache.device)
        if count:
            attention = replace(
                attention,
                query_start=attention.query_start[: count + 1],
                context_lens=attention.context_lens[:count],
                block_tables=attention.block_tables[:count],
            )
            rows = (tensor[:count] for tensor in (token_ids, positions, slots))
            adapter_slots = None if adapter_slots is None else adapter_slots[:count]
            hidden[:count] = self._model.forward(*rows, attention, cache, adapter_slots)
        return hidden


def with_fake_graphs(
    runner: ModelRunner, limits: Limits, max_num_rows: int = MAX_NUM_ROWS, record: FakeGraphs | None = None
) -> ModelRunner:
    """A runner over the same model and cache, which replays fakes."""
    graphs = DecodeGraphs(
        cast(CausalModel, WithoutPadding(runner.model)),
        runner.cache_engine.device_blocks,
        max(limits.max_num_seqs, max_num_rows),
        limits.max_model_len,
        has_adapters=runner.adapters is not None and runner.adapters.room.num_slots > 0,
        record=record or FakeGraphs(),
    )
    return ModelRunner(runner.model, runner.cache_engine, graphs, adapters=runner.adapters)
