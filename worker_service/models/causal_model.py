"""What the worker needs of a network, native or not."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.ops import LoraWeights
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized


def widest(windows: Iterable[int | None]) -> int | None:
    """The `sliding_window` of a network whose layers have these windows; None sees everything."""
    known = list(windows)
    return None if None in known else max(window for window in known if window is not None)


@dataclass(frozen=True)
class LoraPlace:
    """Where the adapters of one projection go: it is this part of a product."""

    weights: LoraWeights
    part: int

    @property
    def num_outputs(self) -> int:
        return self.weights.starts[self.part + 1] - self.weights.starts[self.part]


Fill = Callable[[Mapping[str, Tensor]], None]
"""Copies tensors of a checkpoint to places, by their names in it."""


class ModelConfig(Protocol):
    """The sizes that decide the shape of the cache and the limits of a step."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's state."""

    @property
    def num_layers(self) -> int:
        """How many layers the cache has to hold keys and values of; 0 for an encoder."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def sliding_window(self) -> int | None:
        """How many tokens up to itself a token attends to, whatever the layer; None for all."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Tensors that are others as long as a checkpoint holds none for them, by the names in it."""

    def untied(self, own: frozenset[str]) -> Self:
        """The same where these of the `tied` tensors are there with values of their own."""

    @property
    def ignored_tensors(self) -> Collection[str]:
        """Patterns for names of tensors that checkpoints of this family may hold and the network does without."""


class Loadable(Protocol):
    """A network whose weights lie on a device."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint must hold, by their names in it, and the places that they fill."""

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """Prepare the weights for use, quantised if so asked, or as they are among the `quantized`. Called once, when
        those `checkpoint_tensors` that have memory have been filled. Raises ValueError for weights that cannot be so.
        """

    def allocate_lora(self, num_slots: int, max_rank: int) -> dict[str, LoraPlace]:
        """Make room for so many adapters of up to so many inner units, and say where those of each projection go, by
        its name in a checkpoint. Empty for a network that takes no adapters. Called once, before `pack`."""


class CausalModel(Loadable, Protocol):
    """A network of which every token sees those before it."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        cache: Tensor,
        lora_slots: Tensor | None = None,
    ) -> Tensor:
        """Compute tokens and store their keys and values.

        token_ids, positions, slots: [num_tokens] int64; cache: [num_blocks, num_layers, 2, block_size, num_kv_heads,
        head_dim]; lora_slots: [num_tokens] int32, the slot of each token's adapter, negative for none, or None where no
        token has one. Returns hidden states, [num_tokens, hidden_size].
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size] of `forward`; returns [rows, vocabulary_size] float32.

        bf16 is not enough: logits of 16 to 32 would be multiples of 0.125, and several tokens would share the largest.
        """
