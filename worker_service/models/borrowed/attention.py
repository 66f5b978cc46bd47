"""Registers this project's paged attention in transformers under the name `NAME`.

transformers asks `_describe_mask` for a mask once for each kind of layer, so its code decides which layers have a
window. Layers then call `_attend`, which uses the attention given to `within`. Attention other than a scaled softmax
over a causal window raises ValueError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "pagewire"
"""`attn_implementation` of networks."""

_WITHOUT_EFFECT = frozenset(
    {"cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
     "position_ids", "return_dict", "sliding_window", "use_cache"}
)  # fmt: skip
"""Ignored arguments of layers: the mask expresses them, or they have no effect on inference."""


class Attention(Protocol):
    """The attention of one forward pass. Layers call `attend` in the order of the network."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; all contiguous.
        scale, window, soft_cap, sinks: see `paged_attention`. Returns the shape of query."""


_attention: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def within(attention: Attention) -> Iterator[None]:
    """Compute the attention of transformers' networks with `attention` in this block."""
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


@dataclass(frozen=True)
class _CausalMask:
    """A causal mask. `window`: tokens that a token attends to, including itself; None for all."""

    window: int | None


def _describe_mask(*, config: Any, use_vmap: bool, local_size: int | None = None, **kwargs: Any) -> _CausalMask:
    """Replaces transformers' function for masks. Raises ValueError for an unsupported mask. local_size: size of a
    window or of a chunk; use_vmap: whether the network adds a condition to the mask."""
    if "allow_is_causal_skip" not in kwargs:
        raise ValueError("its tokens attend to later tokens")
    if use_vmap or (local_size is not None and local_size != getattr(config, "sliding_window", None)):
        raise ValueError("its attention has a mask that is neither causal nor a sliding window")
    return _CausalMask(local_size)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Called by layers. query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens,
    head_dim]; s_aux: sinks, [num_heads]. Returns [1, num_tokens, num_heads, head_dim], and None in place of weights."""
    if not getattr(module, "is_causal", True):
        raise ValueError("its tokens attend to later tokens")
    if not isinstance(attention_mask, _CausalMask):
        raise ValueError("its attention has a mask of its own making")
    if unknown := sorted(name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None):
        raise ValueError(f"its attention takes {', '.join(unknown)}, which are not supported")
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    scale = query.shape[2] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    return _attention.get().attend(query, key, value, scale, attention_mask.window, softcap, sinks)[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _describe_mask)
