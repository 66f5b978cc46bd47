"""Runs encoders in transformers' code, with this project's attention, over texts of different lengths. transformers'
code sees all tokens of a step as one sequence without padding; only attention combines tokens, for texts of equal
length together. With packed weights, results are batch-invariant."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPooling

from worker_service.models.borrowed.network import PackedLinear, build_network
from worker_service.models.borrowed.weights import checkpoint_places
from worker_service.models.causal_model import AdapterPlace
from worker_service.models.encoders.encoder_config import EncoderConfig
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized

NAME = "pagewire-encoder"
"""`attn_implementation` of encoders."""

SHORT = 32
"""Tokens of a text up to which a CPU computes attention as two matrix products. One layer of MiniLM, 2,048 tokens, two
cores, torch's function against two products: 5.4 and 1.9 ms for texts of 16 tokens, 6.0 and 3.8 ms for 32, 7.0 and 12.8
ms for 64."""

_FAR = 1 << 30
"""A distance in tokens, above any window."""

_lengths: ContextVar[Sequence[int]] = ContextVar("lengths")


class Encoder:
    def __init__(self, config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._network = build_network(config, dtype, device, NAME, **config.options)
        self._body = self._network.base_model if config.num_labels else self._network

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return {f"{self.config.prefix}{name}": place for name, place in checkpoint_places(self._network).items()}

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """See `Loadable.pack`; without quantisation."""
        assert quantization == "none"
        assert not quantized
        for module in list(self._body.modules()):
            for name, part in module.named_children():
                if type(part) is nn.Linear:
                    setattr(module, name, packed := PackedLinear(part))
                    packed.pack()

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """Encoders cannot have adapters."""
        del num_slots, max_rank
        return {}

    def forward(self, token_ids: Tensor, positions: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns hidden states [num_tokens, hidden_size]. Texts of equal length must be neighbours. token_ids,
        positions, types: [num_tokens] int64, text after text. types: 1 for the second text of a pair, otherwise 0.
        lengths: tokens of each text."""
        others = {"token_type_ids": types[None]} if self.config.has_types else {}
        with _within(lengths):
            output = self._body(
                input_ids=token_ids[None], position_ids=positions[None] + self.config.first_position, **others
            )
        states: Tensor = output.last_hidden_state[0]
        return states

    def classify(self, states: Tensor) -> Tensor:
        """states: hidden states of one text, [tokens, hidden_size]. Returns [num_labels] float32."""
        head = copy.copy(self._network)
        body = _GivenStates(states, getattr(self._body, "pooler", None))
        head._modules = {**self._network._modules, self._network.base_model_prefix: body}
        logits: Tensor = head(input_ids=None, inputs_embeds=states[None]).logits[0]
        return logits.float()


@contextmanager
def _within(lengths: Sequence[int]) -> Iterator[None]:
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


class _GivenStates(nn.Module):
    """Replaces a network's body: returns given hidden states, and the pooler's output for them."""

    def __init__(self, states: Tensor, pooler: nn.Module | None) -> None:
        super().__init__()
        self._states = states[None]
        self._pooler = pooler

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
        pooled = None if self._pooler is None else self._pooler(self._states)
        return BaseModelOutputWithPooling(last_hidden_state=self._states, pooler_output=pooled)


@dataclass(frozen=True)
class _Mask:
    """Attention mask: the whole text, or tokens at most `window` away."""

    window: int | None


def _describe_mask(*, config: Any, use_vmap: bool, mask_function: Any, **_: Any) -> _Mask:
    """Replaces transformers' function for masks. Raises ValueError for an unsupported mask."""
    if use_vmap:
        raise ValueError("its attention has a mask of its own")
    here = torch.tensor(0)
    sees_far = bool(mask_function(here, here, here, torch.tensor(_FAR)))
    return _Mask(None if sees_far else int(config.sliding_window))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query, key, value: [1, num_heads, num_tokens, head_dim]. Returns [1, num_tokens, num_heads, head_dim]."""
    del module
    assert isinstance(attention_mask, _Mask)
    attended = []
    start = 0
    for length, texts in groupby(_lengths.get()):
        count = len(list(texts))
        stop = start + count * length
        shape = (query.shape[1], count, length, query.shape[3])
        q, k, v = (part[0, :, start:stop].view(shape).transpose(0, 1) for part in (query, key, value))
        mask = _band(length, attention_mask.window, query.device)
        attend = _attend_short if length <= SHORT and q.is_cpu else functional.scaled_dot_product_attention
        attended.append(attend(q, k, v, attn_mask=mask, scale=scaling).transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(attended)[None], None


def _attend_short(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's `scaled_dot_product_attention` as two matrix products, faster for short texts. Arguments: [texts, heads,
    tokens, head_dim]."""
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(2, 3)
    if attn_mask is not None:
        scores.masked_fill_(~attn_mask, float("-inf"))
    return scores.softmax(3) @ value


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask of a window, [length, length] bool: True up to `window` tokens apart. None if all True."""
    if window is None or window >= length - 1:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None]).abs() <= window


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _describe_mask)
