"""Runs generative networks without native decoder in transformers' code, with this project's paged attention.

transformers' code sees all tokens of a step as one sequence; only attention combines tokens, and its metadata separates
the sequences. Slower than the native decoder: few operations are fused. Examples of what differs:

    OLMo 2    Norms come only after each half of a layer; query and key norms cover all heads.
    Cohere    Attention and feed-forward network are computed in parallel.
    Granite   Embeddings, residuals and logits have multipliers.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from kernels.backends import ops_for
from worker_service.models.borrowed.attention import Softmax, rows, within
from worker_service.models.borrowed.config import TransformersConfig
from worker_service.models.borrowed.network import Body, Head, attention_of, build_network, pack_linears
from worker_service.models.borrowed.states import within_states
from worker_service.models.borrowed.step_states import StepStates
from worker_service.models.borrowed.weights import checkpoint_places
from worker_service.models.causal_model import (
    AdapterPlace,
    Attention,
    Cache,
    GivenEmbeddings,
    LayerPlace,
    Slots,
    by_layer,
)
from worker_service.models.layers.linear import NONE_QUANTIZED, Linear, Quantization, Quantized


class TransformersModel:
    def __init__(self, config: TransformersConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate weights unfilled; tensors that follow from the configuration, such as rotary frequencies, are
        filled."""
        self.config = config
        self._network = build_network(config, dtype, device, attention_of(config.network_class))
        self._body = Body(self._network)
        self._head = Head(self._network, self._body.module)
        self._adapter_slots: Tensor | None = None  # None outside a forward pass

    @property
    def prompt_embeds_size(self) -> int:
        return self._body.embeds_size

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return checkpoint_places(self._network)

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """See `CausalModel.pack`; without quantisation."""
        assert quantization == "none"
        assert not quantized
        self._head.pack()
        if self.config.needs.states:  # products that depend on the batch would change all later states
            pack_linears([*self._called_linears().values()])

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """See `CausalModel.allocate_adapters`. Only linear layers that are called with all tokens can have adapters, so
        no experts."""
        places = {}
        for name, module in self._called_linears().items():
            linear = Linear(module.weight)
            places[name] = AdapterPlace(linear.allocate_adapters([module.out_features], num_slots, max_rank), 0)
            linear.free()  # `pack` may replace the module's weight
            module.register_forward_hook(self._adding(linear))
        return places

    def _called_linears(self) -> dict[str, nn.Linear]:
        """The linear layers that are called with all tokens, by name."""
        names = {id(module): name for name, module in self._network.named_modules()}
        uncalled = self.config.needs.uncalled
        return {
            name: module
            for module in self._body.module.modules()
            if type(module) is nn.Linear and ".experts." not in (name := names[id(module)]) and name not in uncalled
        }

    def _adding(self, linear: Linear) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            if self._adapter_slots is not None:
                linear.add_lora(output.flatten(0, -2), inputs[0].flatten(0, -2), self._adapter_slots)
            return output

        return add

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
        self._adapter_slots = adapter_slots
        places = [*by_layer(slots, attention, cache)]
        needs = self.config.needs
        layers, states = places[: len(needs.keys)], StepStates(places[len(needs.keys) :])
        with within(_CachedAttention(layers, needs.readers)), within_states(states):
            return self._body(token_ids, positions, given)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden[None])


class _CachedAttention:
    """Attention over the paged KV cache in one forward pass. `readers`: see `Survey.readers`."""

    def __init__(self, layers: Sequence[LayerPlace], readers: Iterable[int]) -> None:
        self._layers, self._readers, self._num_stored = layers, iter(readers), 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        number, width = next(self._readers), max(key.shape[-1], value.shape[-1])
        layer_cache, slots, metadata = self._layers[number]
        ops, bias = ops_for(layer_cache.device), None
        if number == self._num_stored:  # otherwise, an earlier layer has stored these keys and values
            ops.store_kv(rows(key, width), rows(value, width), layer_cache, slots)
            self._num_stored += 1
        if softmax.slopes is not None:
            distances = torch.arange(metadata.max_context_len, device=query.device)
            bias = -softmax.slopes[:, None] * distances
        attended = ops.paged_attention(
            rows(query, width), layer_cache, metadata, softmax.scale, softmax.window, softmax.soft_cap, bias,
            sinks=softmax.sinks, chunked=softmax.chunked,
        )  # fmt: skip
        return attended[..., : value.shape[-1]]
