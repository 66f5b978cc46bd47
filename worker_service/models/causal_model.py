"""Interfaces between the worker and its networks, both native networks and transformers' networks."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.ops import LoraWeights
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized


def widest(windows: Iterable[int | None]) -> int | None:
    """The largest of the layers' windows; None if a layer has no window."""
    known = list(windows)
    return None if None in known else max(window for window in known if window is not None)


@dataclass(frozen=True)
class AdapterPlace:
    """The place of one projection's adapters: part number `part` of a fused product's adapter weights."""

    weights: LoraWeights
    part: int

    @property
    def num_outputs(self) -> int:
        return self.weights.starts[self.part + 1] - self.weights.starts[self.part]


Fill = Callable[[Mapping[str, Tensor]], None]
"""A function that copies tensors of a checkpoint to places. Keys are the tensors' names in the checkpoint."""


class ModelConfig(Protocol):
    """The sizes of a network from which the worker derives the cache's shape and the limits of a step."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Size of a token's hidden state."""

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values in the cache; 0 for an encoder."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def sliding_window(self) -> int | None:
        """The largest sliding window of all layers, in tokens; None if a layer has no window. A window includes the
        token itself."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Tied tensors by name. Value: the name of the tensor that is used if the checkpoint lacks the tied tensor."""

    def untied(self, own: frozenset[str]) -> Self:
        """A copy of the config for a checkpoint that has separate values for the tied tensors in `own`."""

    @property
    def ignored_tensors(self) -> Collection[str]:
        """Regular expressions for names of checkpoint tensors that this family's network does not use."""


class Loadable(Protocol):
    """A network with weights in a device's memory."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The tensors that must be filled from a checkpoint, by their names in the checkpoint."""

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """Prepare the weights for use: quantise as requested, or use the weights in `quantized`.

        Called once. Before the call, all `checkpoint_tensors` that have memory must be filled. Raises ValueError if
        weights cannot be quantised as requested.
        """

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """Allocate slots for `num_slots` adapters of rank up to `max_rank`. Called once, before `pack`.

        Returns the place of each projection's adapters, by the projection's name in a checkpoint. The result is empty
        if the network does not support adapters.
        """


class CausalModel(Loadable, Protocol):
    """A network in which a token attends only to itself and to earlier tokens."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        cache: Tensor,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """Compute tokens and store their keys and values. Returns hidden states, [num_tokens, hidden_size].

        token_ids, positions, slots: [num_tokens] int64; cache: [num_blocks, num_layers, 2, block_size, num_kv_heads,
        head_dim]; adapter_slots: [num_tokens] int32, the slot of each token's adapter, negative for a token without an
        adapter; None if no token has an adapter.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits. hidden: [rows, hidden_size] from `forward`. Returns [rows, vocabulary_size] float32.

        bf16 is too coarse for logits. Logits from 16 to 32 would be multiples of 0.125, so several tokens would share
        the maximum.
        """
