"""Interfaces of the networks that a worker runs, native or in transformers' code."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from kernels.inputs import AttentionMetadata
from kernels.ops import LoraWeights
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized


def widest(windows: Iterable[int | None]) -> int | None:
    """The largest of the layers' windows; None if a layer has no window."""
    known = list(windows)
    return None if None in known else max(window for window in known if window is not None)


class LayerCache(NamedTuple):
    blocks: Tensor | tuple[Tensor, ...]
    """Keys and values, [num_blocks, kv_parts, block_size, num_kv_heads, head_dim], or the layer's states, each
    [num_blocks, ...]."""
    group: int
    """The layer's group, which has a block table of its own."""


class GroupedCache(NamedTuple):
    """A KV cache whose layers are in groups."""

    layers: Sequence[LayerCache]
    block_sizes: Sequence[int]
    """Tokens of a block in each group; 0 for a group with states."""


class GivenEmbeddings(NamedTuple):
    """Embeddings that replace those of placeholder tokens."""

    rows: Tensor
    """[number] int64: rows of the step, each at most once."""
    embeddings: Tensor
    """[number, prompt_embeds_size] float32, as in transformers' `inputs_embeds`."""
    deep_rows: Tensor | None = None
    """[others] int64: rows to whose hidden states `deep` is added."""
    deep: Sequence[Tensor] = ()
    """Terms to add after each of the first layers (DeepStack; Meng et al., 2024), [others, hidden_size] float32."""


Slots = Tensor | Sequence[Tensor]
"""Slots of the KV cache, [num_tokens] int64. With groups: for each group; empty for a group with states."""
Attention = AttentionMetadata | Sequence[AttentionMetadata]
"""The sequences of a step. With groups: with the block tables of each group. A group with states has tables of one
entry, the block of each sequence."""
Cache = Tensor | GroupedCache
"""[num_blocks, num_layers, kv_parts, block_size, num_kv_heads, head_dim], or layers in groups."""
LayerPlace = tuple[Any, Tensor, AttentionMetadata]
"""A layer's keys and values (a tensor) or states (a tuple), its slots, and the sequences."""


def by_layer(slots: Slots, attention: Attention, cache: Cache) -> Iterator[LayerPlace]:
    """Each layer's cache, slots and sequences, in the order of the layers' needs."""
    if isinstance(cache, GroupedCache):
        assert not isinstance(slots, Tensor)
        assert not isinstance(attention, AttentionMetadata)
        return ((layer.blocks, slots[layer.group], attention[layer.group]) for layer in cache.layers)
    assert isinstance(slots, Tensor)
    assert isinstance(attention, AttentionMetadata)
    return ((layer, slots, attention) for layer in cache.unbind(1))


@dataclass(frozen=True)
class AdapterPlace:
    """A projection's place for adapters: part number `part` of a linear layer with fused projections."""

    weights: LoraWeights
    part: int

    @property
    def num_outputs(self) -> int:
        return self.weights.starts[self.part + 1] - self.weights.starts[self.part]


Fill = Callable[[Mapping[str, Tensor]], None]
"""Copies checkpoint tensors, by name, to their places in memory."""


class ModelConfig(Protocol):
    """A network's sizes, which determine the shape of the KV cache and the limits of a step."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Size of a token's hidden state."""

    @property
    def num_layers(self) -> int:
        """Layers in the KV cache; 0 for an encoder."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def kv_parts(self) -> int:
        """2 for keys and values in the KV cache; 1 if a head's key is also its value (latent attention)."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def sliding_window(self) -> int | None:
        """The largest window of all layers, in tokens including the query; None if a layer has no window."""

    @property
    def windows(self) -> Sequence[int | None]:
        """Each layer's window, see `sliding_window`. A network whose layers differ otherwise, too, has an attribute
        `layer_needs` (see `worker_service.models.layer_needs.needs_of`)."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Tied tensors, each with the tensor to use if the checkpoint lacks it."""

    def untied(self, own: frozenset[str]) -> Self:
        """A copy for a checkpoint with separate values for the tied tensors in `own`."""

    @property
    def ignored_tensors(self) -> Collection[str]:
        """Patterns for names of checkpoint tensors that this family does not use."""


class Loadable(Protocol):
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The tensors to fill, by their names in a checkpoint."""

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """Quantise the weights, or use those in `quantized`. Raises ValueError if impossible. Called once, after all
        tensors of `checkpoint_tensors` off the meta device have been filled."""

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """Allocate memory for adapters, at most once and before `pack`. Returns the places by projection name in a
        checkpoint; empty if the network does not support adapters."""


class CausalModel(Loadable, Protocol):
    """A network for generation: tokens attend to themselves and to earlier tokens."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def prompt_embeds_size(self) -> int:
        """Elements of a token's embedding; 0 if `forward` takes no `given`."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Slots,
        attention: Attention,
        cache: Cache,
        adapter_slots: Tensor | None = None,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """Compute a step's hidden states [num_tokens, hidden_size], and store keys and values in the cache. token_ids:
        [num_tokens] int64. positions: [num_tokens] int64, or [3, num_tokens] in a network with positions in three
        axes. adapter_slots: [num_tokens] int32, negative without adapter; None if no token has an adapter."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size] from `forward`. Returns [rows, vocabulary_size]. float32, because bf16 logits
        between 16 and 32 are multiples of 0.125: several tokens would share the maximum."""
