"""Embeddings of tokens for single layers (per-layer embeddings; Gemma Team, 2025)."""

from functools import partial
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from kernels.ops import Ops
from worker_service.models.layers.embedding import Embedding
from worker_service.models.layers.linear import Linear, Quantized
from worker_service.parallel.ranks import ALONE

_TABLE = "model.embed_tokens_per_layer.weight"
_PROJECTION = "model.per_layer_model_projection.weight"
_NORM = "model.per_layer_projection_norm.weight"


class PerLayerEmbeddings:
    """A token's embedding for each layer plus a projection of the embedding that enters the first layer, divided by the
    root of 2. The table is never quantised."""

    def __init__(
        self, vocabulary_size: int, hidden_size: int, num_layers: int, size: int, eps: float, dtype: torch.dtype,
        device: torch.device, ops: Ops,
    ) -> None:  # fmt: skip
        """Allocate weights unfilled. size: elements for one layer."""
        self._hidden_size, self._size, self._eps, self._ops, self._dtype = hidden_size, size, eps, ops, dtype
        empty = partial(torch.empty, dtype=dtype, device=device)
        self._table = Embedding(empty(vocabulary_size, num_layers * size), range(vocabulary_size), ALONE)
        self._projection = Linear(empty(num_layers * size, hidden_size), wide=True, ops=ops)
        self._norm = empty(size)
        self._scale = torch.tensor(size**0.5, dtype=dtype).item()  # rounded, as in training

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by their names in a checkpoint."""
        return {_TABLE: self._table.weight, _PROJECTION: self._projection.weight, _NORM: self._norm}

    def pack(self, quantized: Quantized) -> None:
        """Raises ValueError if the checkpoint quantises the table."""
        if _TABLE in quantized:
            raise ValueError(f"{_TABLE} is quantised, which is not supported")
        if (found := quantized.get(_PROJECTION)) is None:
            self._projection.pack()
        else:
            self._projection.pack_parts([found], [len(self._projection.weight)])

    def __call__(self, token_ids: Tensor, embeddings: Tensor) -> tuple[Tensor, ...]:
        """token_ids: [num_tokens] int64; embeddings: [num_tokens, hidden_size] float32, scaled. Returns for each layer
        [num_tokens, size]."""
        projected = self._projection(embeddings.to(self._dtype)) * self._hidden_size**-0.5
        normed = self._ops.rms_norm(projected.view(-1, self._size), self._norm, self._eps, 0.0, torch.float32)
        sums = normed.view_as(projected) + self._table(token_ids) * self._scale
        return torch.split((sums * 2.0**-0.5).to(self._dtype), self._size, dim=1)


class PerLayerHalf:
    """The last part of a layer: adds what a gate lets through of the token's embedding for the layer."""

    def __init__(
        self, sizes: tuple[int, int], activation: str, dtype: torch.dtype, device: torch.device, ops: Ops, *,
        deferred: bool,
    ) -> None:  # fmt: skip
        """sizes: of hidden states, and of a token's embedding for the layer. deferred: see `Linear.allocate`."""
        self._sizes, self._activation, self._ops = sizes, activation, ops
        hidden, size = sizes
        allocate = partial(Linear.allocate, biased=False, dtype=dtype, device=device, deferred=deferred, ops=ops)
        self._gate = allocate(size, hidden)
        self._projection = allocate(hidden, size, wide=ops.WIDE_PRODUCTS)

    vectors: ClassVar[MappingProxyType[str, Tensor]] = MappingProxyType({})

    @property
    def projections(self) -> list[tuple[Linear, dict[str, int]]]:
        hidden, size = self._sizes
        return [(self._gate, {"per_layer_input_gate": size}), (self._projection, {"per_layer_projection": hidden})]

    @property
    def adapted(self) -> list[tuple[Linear, dict[str, int]]]:
        return self.projections

    def __call__(self, x: Tensor, per_layer: Tensor, adapter_slots: Tensor | None) -> Tensor:
        """x: [num_tokens, hidden_size]; per_layer: [num_tokens, size], from `PerLayerEmbeddings`."""
        gated = torch.cat((self._gate(x, adapter_slots), per_layer), dim=1)
        return self._projection(self._ops.gated_activation(gated, self._activation), adapter_slots)
