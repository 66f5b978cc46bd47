"""A network of encoder and decoder, run through its own code in transformers with attention of ours in both.

The encoder reads one input at a time, so that what it makes of it depends on nothing else. Of its states each layer of
the decoder makes keys and values, once, and these go into blocks: `encode`. The decoder computes the tokens of a step
as one row, as other networks do; its layers attend to two tables of blocks, their own tokens' and the encoder's.

T5 adds to each score a number that depends on how far apart two tokens are (Raffel et al., 2020); BART (Lewis et al.,
2020) and Whisper (Radford et al., 2023) add an embedding of the position to the token.
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

from kernels.attention.metadata import AttentionMetadata
from kernels.backends import ops_for
from worker_service.models.borrowed.network import Head, PackedLinear, build_network
from worker_service.models.borrowed.weights import checkpoint_places
from worker_service.models.causal_model import LoraPlace
from worker_service.models.encoders.encoder_decoder_config import EncoderDecoderConfig
from worker_service.models.layers.linear import NONE_QUANTIZED, Linear, Quantization, Quantized

NAME = "pagewire-encoder-decoder"
"""The value for a network's `attn_implementation`."""

_CROSS = ("EncDecAttention", "encoder_attn")
"""What families call the attention of a decoder's layer to the encoder's tokens."""
_SELF = ("SelfAttention", "self_attn")


class EncoderDecoder:
    """The network from an encoder's input and token ids to logits."""

    def __init__(self, config: EncoderDecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights, without values yet; tensors that the configuration determines have theirs."""
        self.config = config
        network = self._network = build_network(config, dtype, device, NAME)
        self._dtype, self._device = dtype, device
        self._ops = ops_for(device)
        self._encoder, self._decoder = network.get_encoder(), network.get_decoder()
        self._layers = {id(m): layer for names in (_SELF, _CROSS) for layer, m in enumerate(self._named(names))}
        self._cross = self._named(_CROSS)
        self._bias: Tensor | None = None
        self._loras: dict[int, Linear] = {}  # by the identity of the layer whose product they add to
        self._head = Head(network, self._decoder)

    def _named(self, names: tuple[str, ...]) -> list[Any]:
        """The decoder's modules of these names, layer after layer."""
        return [module for name, module in self._decoder.named_modules() if name.rpartition(".")[2] in names]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """As `CausalModel` has it."""
        return checkpoint_places(self._network)

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """As `CausalModel` has it, but never quantised."""
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
                        setattr(module, name, _AdaptedLinear(child, self._loras.get(id(child))))

    def _bias_by_distance(self) -> Tensor:
        """T5's, [num_heads, distances] float32. Beyond the last one it stays the same.

        The decoder's first layer makes it for all; made anew in each step it would have a number for each pair of the
        step's tokens.
        """
        attention = self._named(_SELF)[0]
        farthest = self.config.network.relative_attention_max_distance
        bias = attention.compute_bias(1, farthest + 1, past_seen_tokens=farthest)  # [1, heads, 1, farthest + 1]
        nothing = bias.new_empty(0)
        for module in (attention, self._cross[0]):
            module.has_relative_attention_bias = True
            module.compute_bias = lambda *_, **__: nothing
        table: Tensor = bias[0, :, 0].flip(1).float().contiguous()
        return table

    def allocate_lora(self, num_slots: int, max_rank: int) -> dict[str, LoraPlace]:
        """As `CausalModel` has it, for the linear layers of encoder and decoder."""
        places = {}
        parts = {id(module) for part in (self._encoder, self._decoder) for module in part.modules()}
        for name, module in self._network.named_modules():
            if type(module) is nn.Linear and id(module) in parts:
                linear = self._loras[id(module)] = Linear(module.weight)
                places[name] = LoraPlace(linear.allocate_lora([module.out_features], num_slots, max_rank), 0)
        return places

    def encode(self, given: Tensor, slots: Tensor, cache: Tensor, lora_slots: Tensor | None = None) -> None:
        """Have the encoder read one input, and store what each layer of the decoder makes of it.

        given: [num_tokens] int64, or of a sound [num_mel_bins, num_frames] float32; slots: [num_tokens] int64; cache
        and lora_slots: as `CausalModel.forward` has them.
        """
        with _within(_Whole(), lora_slots):
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
        lora_slots: Tensor | None = None,
        queries: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """As `CausalModel` has it. cross: the same sequences, with the encoder's tokens as their contexts.

        queries: takes the queries of each layer's cross attention, scaled, [num_tokens, num_heads, head_dim].
        """
        nothing = torch.zeros((1, 1, self.config.hidden_size), dtype=self._dtype, device=self._device)
        with _within(_Paged(self._layers, positions, slots, attention, cross, cache, self._bias, queries), lora_slots):
            output = self._decoder(
                input_ids=token_ids[None],
                attention_mask=token_ids.new_ones((1, len(token_ids))),
                # A network without it would leave cross attention out; what attention is handed of it is not used.
                encoder_hidden_states=nothing,
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As `CausalModel` has it."""
        states = (hidden[None],)  # the encoder's, which nothing reads
        return self._head(encoder_outputs=states, decoder_inputs_embeds=hidden[None])


class _Attention(Protocol):
    """Computes the attention of one layer after the other: [1, num_heads, num_tokens, head_dim] each."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        """Returns [1, num_tokens, num_heads, head_dim]."""


class _Whole:
    """Of an encoder: all tokens see each other. bias: [1, num_heads, num_tokens, num_tokens]."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        del module
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        return attended.transpose(1, 2)


@dataclass(frozen=True)
class _Paged:
    """Of a decoder, over the paged cache."""

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
        del bias  # that of a whole row of tokens, which is made for no step
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
_lora_slots: ContextVar[Tensor | None] = ContextVar("lora_slots", default=None)


@contextmanager
def _within(attention: _Attention, lora_slots: Tensor | None) -> Iterator[None]:
    token, slots_token = _attention.set(attention), _lora_slots.set(lora_slots)
    try:
        yield
    finally:
        _attention.reset(token)
        _lora_slots.reset(slots_token)


class _AdaptedLinear(PackedLinear):
    """Takes the place of a linear layer, with room for adapters."""

    def __init__(self, linear: nn.Linear, lora: Linear | None) -> None:
        super().__init__(linear)
        self.pack()
        self._lora = lora

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        slots = _lora_slots.get()
        # In a decoder's pass, cross attention has keys and values made of a single row, which nothing reads.
        if self._lora is not None and slots is not None and slots.numel() == product[..., 0].numel():
            self._lora.add_lora(product.flatten(0, -2), x.flatten(0, -2), slots)
        return product


class _Positions(nn.Module):
    """Takes the place of a decoder's embedding of positions, which counts from the first token of a row."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = embedding

    def forward(self, *_: Any, **__: Any) -> Tensor:
        paged = _attention.get()
        assert isinstance(paged, _Paged)
        embedded: Tensor = self._embedding(None, position_ids=paged.positions)
        return embedded


def _describe_mask(**_: Any) -> str:
    """Takes the place of the function that fills a mask: which tokens see which is known without."""
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
