"""Runs encoder-decoders in transformers' code, with this project's attention.

`encode` runs the encoder once for each input (text or sound), never for several together, and so is batch-invariant. It
stores each decoder layer's keys and values for cross-attention in cache blocks. A sequence has two block tables: for
the decoder's and for the encoder's tokens. T5 adds a bias by distance to attention scores (Raffel et al., 2020); BART
(Lewis et al., 2020) and Whisper (Radford et al., 2023) have position embeddings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from kernels.backends import ops_for
from kernels.inputs import AttentionMetadata
from worker_service.models.borrowed.network import Head, PackedLinear, build_network
from worker_service.models.borrowed.weights import checkpoint_places
from worker_service.models.causal_model import AdapterPlace
from worker_service.models.encoders.encoder_decoder_config import EncoderDecoderConfig
from worker_service.models.layers.linear import NONE_QUANTIZED, Linear, Quantization, Quantized

NAME = "pagewire-encoder-decoder"
"""`attn_implementation` of encoder-decoders."""

_CROSS = ("EncDecAttention", "encoder_attn")
"""Names of cross-attention modules in transformers' code."""
_SELF = ("SelfAttention", "self_attn")


class EncoderDecoder:
    def __init__(self, config: EncoderDecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate weights unfilled; tensors that follow from the configuration, such as sinusoids, are filled."""
        self.config = config
        network = self._network = build_network(config, dtype, device, NAME)
        self._dtype, self._device = dtype, device
        self._ops = ops_for(device)
        self._encoder, self._decoder = network.get_encoder(), network.get_decoder()
        self._layers = {id(m): layer for names in (_SELF, _CROSS) for layer, m in enumerate(self._named(names))}
        self._cross = self._named(_CROSS)
        self._bias: Tensor | None = None
        self._adapters: dict[int, Linear] = {}  # by id() of the adapted layer
        self._head = Head(network, self._decoder)

    def _named(self, names: tuple[str, ...]) -> list[Any]:
        """The decoder's modules with these names, in the order of the layers."""
        return [module for name, module in self._decoder.named_modules() if name.rpartition(".")[2] in names]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return checkpoint_places(self._network)

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """See `CausalModel.pack`; without quantisation."""
        assert quantization == "none"
        assert not quantized
        self._head.pack()
        if hasattr(self._decoder, "embed_positions"):
            self._decoder.embed_positions = _Positions(self._decoder.embed_positions)
        else:
            self._bias = self._bias_by_distance()
        for part in (self._encoder, self._decoder):
            for module in list(part.modules()):
                for name, child in module.named_children():
                    if type(child) is nn.Linear:
                        setattr(module, name, _AdaptedLinear(child, self._adapters.get(id(child))))

    def _bias_by_distance(self) -> Tensor:
        """T5's biases by distance, [num_heads, distances] float32; the last entry is for all larger distances. Replaces
        transformers' slower code: its first decoder layer computes the bias of all pairs in each step."""
        attention = self._named(_SELF)[0]
        farthest = self.config.network.relative_attention_max_distance
        bias = attention.compute_bias(1, farthest + 1, past_seen_tokens=farthest)  # [1, heads, 1, farthest + 1]
        nothing = bias.new_empty(0)
        for module in (attention, self._cross[0]):
            module.has_relative_attention_bias = True
            module.compute_bias = lambda *_, **__: nothing
        table: Tensor = bias[0, :, 0].flip(1).float().contiguous()
        return table

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """See `CausalModel.allocate_adapters`. All linear layers can have adapters."""
        places = {}
        parts = {id(module) for part in (self._encoder, self._decoder) for module in part.modules()}
        for name, module in self._network.named_modules():
            if type(module) is nn.Linear and id(module) in parts:
                linear = self._adapters[id(module)] = Linear(module.weight)
                places[name] = AdapterPlace(linear.allocate_adapters([module.out_features], num_slots, max_rank), 0)
        return places

    def encode(self, given: Tensor, slots: Tensor, cache: Tensor, adapter_slots: Tensor | None = None) -> None:
        """Run the encoder over one input, and store all layers' cross-attention keys and values. given: text
        [num_tokens] int64, or sound [num_mel_bins, num_frames] float32. slots: [num_tokens] int64, of the encoder's
        tokens. cache, adapter_slots: see `CausalModel.forward`."""
        with _within(_Whole(), adapter_slots):
            if self.config.num_mel_bins:
                output = self._encoder(given[None].to(self._dtype))
            else:
                output = self._encoder(input_ids=given[None], attention_mask=torch.ones_like(given[None]))
            states = output.last_hidden_state[0]
            shape = (len(states), self.config.num_kv_heads, self.config.head_dim)
            for layer, attention in enumerate(self._cross):
                names = ("k", "v") if hasattr(attention, "k") else ("k_proj", "v_proj")
                keys, values = (getattr(attention, name)(states).view(shape) for name in names)
                self._ops.store_kv(keys, values, cache[:, layer], slots)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        cache: Tensor,
        cross: AttentionMetadata,
        adapter_slots: Tensor | None = None,
        queries: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """See `CausalModel.forward`. cross: metadata of the same sequences over the encoder's tokens. queries: takes
        each layer's scaled cross-attention queries, [num_tokens, num_heads, head_dim]."""
        nothing = torch.zeros((1, 1, self.config.hidden_size), dtype=self._dtype, device=self._device)
        paged = _Paged(self._layers, positions, slots, attention, cross, cache, self._bias, queries)
        with _within(paged, adapter_slots):
            output = self._decoder(
                input_ids=token_ids[None],
                attention_mask=token_ids.new_ones((1, len(token_ids))),
                # A placeholder, ignored by `_Paged`: without it, the network skips cross-attention.
                encoder_hidden_states=nothing,
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        states = (hidden[None],)  # a placeholder that the head ignores
        return self._head(encoder_outputs=states, decoder_inputs_embeds=hidden[None])


class _Attention(Protocol):
    """The attention of one forward pass. query, key, value: [1, num_heads, num_tokens, head_dim]."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        """module: an attention module of a layer. Returns [1, num_tokens, num_heads, head_dim]."""


class _Whole:
    """Encoder: all tokens attend to each other. bias: [1, num_heads, num_tokens, num_tokens]."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        del module
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        return attended.transpose(1, 2)


@dataclass(frozen=True)
class _Paged:
    """Decoder: attention over the paged KV cache."""

    layers: dict[int, int]
    positions: Tensor
    slots: Tensor
    metadata: AttentionMetadata
    cross: AttentionMetadata
    cache: Tensor
    bias: Tensor | None
    queries: dict[int, Tensor] | None = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        del bias  # for a single sequence; `self.bias` replaces it
        ops = ops_for(self.cache.device)
        layer = self.layers[id(module)]
        layer_cache = self.cache[:, layer]
        query = query[0].transpose(0, 1)
        if not module.is_causal:
            if self.queries is not None:
                self.queries[layer] = query * scale
            return ops.paged_attention(query.contiguous(), layer_cache, self.cross, scale, causal=False)[None]
        keys, values = (part[0].transpose(0, 1).contiguous() for part in (key, value))
        ops.store_kv(keys, values, layer_cache, self.slots)
        return ops.paged_attention(query.contiguous(), layer_cache, self.metadata, scale, bias=self.bias)[None]


_attention: ContextVar[_Attention] = ContextVar("attention")
_adapter_slots: ContextVar[Tensor | None] = ContextVar("adapter_slots", default=None)


@contextmanager
def _within(attention: _Attention, adapter_slots: Tensor | None) -> Iterator[None]:
    token, slots_token = _attention.set(attention), _adapter_slots.set(adapter_slots)
    try:
        yield
    finally:
        _attention.reset(token)
        _adapter_slots.reset(slots_token)


class _AdaptedLinear(PackedLinear):
    """Replaces a linear layer, and adds adapters' outputs."""

    def __init__(self, linear: nn.Linear, adapter: Linear | None) -> None:
        super().__init__(linear)
        self.pack()
        self._adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        slots = _adapter_slots.get()
        # In the decoder, cross-attention's keys and values multiply a placeholder row, without adapters.
        if self._adapter is not None and slots is not None and slots.numel() == product[..., 0].numel():
            self._adapter.add_lora(product.flatten(0, -2), x.flatten(0, -2), slots)
        return product


class _Positions(nn.Module):
    """Replaces a decoder's position embedding, which would count from the first token of the forward pass."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = embedding

    def forward(self, *_: Any, **__: Any) -> Tensor:
        paged = _attention.get()
        assert isinstance(paged, _Paged)
        embedded: Tensor = self._embedding(None, position_ids=paged.positions)
        return embedded


def _describe_mask(**_: Any) -> str:
    """Replaces transformers' function for masks: `_Whole` and `_Paged` need none."""
    return NAME


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    del attention_mask
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return _attention.get().attend(module, query, key, value, scale, position_bias), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _describe_mask)
