"""Interfaces that the worker uses to call a network. Native networks and networks in transformers' code implement the
same interfaces."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.ops import LoraWeights
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized


def widest(windows: Iterable[int | None]) -> int | None:
    """The largest sliding window of all layers; None if a layer has no window. `windows` contains the window of each
    layer."""
    known = list(windows)
    return None if None in known else max(window for window in known if window is not None)


@dataclass(frozen=True)
class AdapterPlace:
    """Where the adapters of one projection are stored: part number `part` of the adapter weights of a linear layer with
    fused projections."""

    weights: LoraWeights
    part: int

    @property
    def num_outputs(self) -> int:
        return self.weights.starts[self.part + 1] - self.weights.starts[self.part]


Fill = Callable[[Mapping[str, Tensor]], None]
"""A function that copies tensors of a checkpoint to their places in memory. The mapping's keys are the tensors' names
in the checkpoint."""


class ModelConfig(Protocol):
    """The sizes of a network. From these sizes, the worker derives the shape of the KV cache and the limits of a
    step."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Size of a token's hidden state."""

    @property
    def num_layers(self) -> int:
        """Number of layers whose keys and values are in the KV cache; 0 for an encoder."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def sliding_window(self) -> int | None:
        """The largest sliding window of all layers, in tokens; None if a layer has no window. The size of a window
        includes the query token itself."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Tied tensors by name. The value is the name of the tensor that is used if the checkpoint lacks the tied
        tensor."""

    def untied(self, own: frozenset[str]) -> Self:
        """A copy of this configuration for a checkpoint that has separate values for the tied tensors in `own`."""

    @property
    def ignored_tensors(self) -> Collection[str]:
        """Regular expressions for the names of checkpoint tensors that the networks of this model family do not use."""


class Loadable(Protocol):
    """A network whose weights are loaded from a checkpoint into the memory of a device."""

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The network's tensors that must be filled from a checkpoint, by the tensors' names in the checkpoint."""

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """Prepare the weights for forward passes: quantise the weights as requested, or use the quantised weights in
        `quantized`.

        `pack` is called once. Before the call, all tensors of `checkpoint_tensors` that are not on the meta device must
        be filled. Raises ValueError if weights cannot be quantised as requested.
        """

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """Allocate memory for `num_slots` adapters of rank up to `max_rank`. `allocate_adapters` is called at most
        once, before `pack`.

        Returns where the adapters of each projection are stored, by the projection's name in a checkpoint. The result
        is empty if the network does not support adapters.
        """


class CausalModel(Loadable, Protocol):
    """A network for generation, in which a token attends only to itself and to earlier tokens."""

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
        """Run a forward pass over the tokens of a step, and store the tokens' keys and values in the cache. Returns
        hidden states, [num_tokens, hidden_size].

        token_ids, positions and slots are [num_tokens] int64. cache is [num_blocks, num_layers, 2, block_size,
        num_kv_heads, head_dim]. adapter_slots is [num_tokens] int32, the slot of each token's adapter, or a negative
        number for a token without an adapter. adapter_slots is None if no token of the step has an adapter.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits from hidden states. hidden is [rows, hidden_size] from `forward`. Returns [rows,
        vocabulary_size] float32.

        Logits are float32, because bf16 is too coarse. In bf16, logits between 16 and 32 would be multiples of 0.125,
        so several tokens would share the maximum.
        """
