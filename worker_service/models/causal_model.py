"""Interfaces between the worker and a network, native or not."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.ops import LoraWeights
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized


def widest(windows: Iterable[int | None]) -> int | None:
    """The `sliding_window` of a network whose layers have these windows; None if a layer has no window."""
    known = list(windows)
    return None if None in known else max(window for window in known if window is not None)


@dataclass(frozen=True)
class AdapterPlace:
    """The place of one projection's adapters: part number `part` of a product."""

    weights: LoraWeights
    part: int

    @property
    def num_outputs(self) -> int:
        return self.weights.starts[self.part + 1] - self.weights.starts[self.part]


Fill = Callable[[Mapping[str, Tensor]], None]
"""Copies tensors of a checkpoint to places; keys are the tensors' names in the checkpoint."""


class ModelConfig(Protocol):
    """The sizes that decide the shape of the cache and the limits of a step."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Numbers in a token's hidden state."""

    @property
    def num_layers(self) -> int:
        """Layers whose keys and values the cache holds; 0 for an encoder."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def sliding_window(self) -> int | None:
        """Tokens to which a token attends at most, itself included, in any layer; None if some layer has no window."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Tied tensors by name, each with the name of the tensor that replaces it if a checkpoint lacks it."""

    def untied(self, own: frozenset[str]) -> Self:
        """The same config for a checkpoint in which the `tied` tensors in `own` have values of their own."""

    @property
    def ignored_tensors(self) -> Collection[str]:
        """Name patterns of checkpoint tensors that this family's network does not use."""


class Loadable(Protocol):
    """A network whose weights lie on a device."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Places to fill, by the names of all tensors that a checkpoint must hold."""

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """Prepare the weights for use: quantised as requested, or taken from `quantized`.

        Called once, after the `checkpoint_tensors` that have memory have been filled. Raises ValueError for weights
        that cannot be quantised as requested.
        """

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """Allocate slots for `num_slots` adapters of rank up to `max_rank`. Called once, before `pack`.

        Returns the place of each projection by its name in a checkpoint; empty for a network that takes no adapters.
        """


class CausalModel(Loadable, Protocol):
    """A network in which every token attends to earlier tokens."""

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
        head_dim]; adapter_slots: [num_tokens] int32, the slot of each token's adapter, negative for none, or None if no
        token has an adapter.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size] from `forward`; returns [rows, vocabulary_size] float32.

        bf16 is too coarse: logits from 16 to 32 would be multiples of 0.125, and several tokens would share the
        maximum.
        """
