"""Our attention for transformers' networks, registered there under the name `NAME`.

Under this name transformers calls `_describe_mask` for a step's masks, one for each kind of layer. Every layer hands
its mask, queries, keys and values to `_attend`. A mask is a description, not a tensor, so a window applies exactly
where the network's own code applies it. The network runs inside a `within` block, whose caller chooses the attention.

A network that needs more than a scaled softmax over a causal window raises ValueError: it would compute wrong results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "pagewire"
"""Value of a network's `attn_implementation`."""

_WITHOUT_EFFECT = frozenset(
    {"cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
     "position_ids", "return_dict", "sliding_window", "use_cache"}
)  # fmt: skip
"""Further arguments of layers: the mask already holds their meaning, or inference does not use them."""


class Attention(Protocol):
    """Computes a layer's attention; layers call it in order."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        """query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; all contiguous.

        scale, window, soft_cap: as for `paged_attention`. Returns the shape of query.
        """


_attention: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def within(attention: Attention) -> Iterator[None]:
    """Networks that run in this block use `attention`."""
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


@dataclass(frozen=True)
class _CausalMask:
    """Each token attends to itself and to earlier tokens: all of them, or the last ones up to the window."""

    window: int | None


def _describe_mask(*, config: Any, use_vmap: bool, local_size: int | None = None, **kwargs: Any) -> _CausalMask:
    """Replaces the transformers function that fills a mask.

    `local_size` is a window or a chunk. With `use_vmap` the mask has additions.
    """
    if "allow_is_causal_skip" not in kwargs:
        raise ValueError("its tokens attend to later ones")
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
    **others: object,
) -> tuple[Tensor, None]:
    """query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, head_dim].

    Returns [1, num_tokens, num_heads, head_dim], and no weights.
    """
    if not getattr(module, "is_causal", True):
        raise ValueError("its tokens attend to later ones")
    if not isinstance(attention_mask, _CausalMask):
        raise ValueError("its attention has a mask of its own making")
    if others.get("s_aux") is not None:
        raise ValueError("its attention has learned sinks")
    if unknown := sorted(name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None):
        raise ValueError(f"its attention takes {', '.join(unknown)}, which ours does not")
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    scale = query.shape[2] ** -0.5 if scaling is None else scaling
    return _attention.get().attend(query, key, value, scale, attention_mask.window, softcap)[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _describe_mask)
