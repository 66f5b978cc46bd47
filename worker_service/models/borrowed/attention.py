"""Registers this project's paged attention in transformers, under the name `NAME`.

In each forward pass, transformers calls `_describe_mask` once for each kind of layer. `_describe_mask` returns a short
description of the mask instead of a tensor. Every layer passes this description and its queries, keys and values to
`_attend`. The network's own code thus decides which layers have a window. A forward pass runs inside a `within` block,
and the block's argument computes the attention.

If a network requires any other attention than a scaled softmax over a causal window, a ValueError is raised, because
the network's results would be wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "pagewire"
"""Name under which transformers knows this project's paged attention. The name is passed as a network's
`attn_implementation`."""

_WITHOUT_EFFECT = frozenset(
    {"cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
     "position_ids", "return_dict", "sliding_window", "use_cache"}
)  # fmt: skip
"""Arguments that layers pass to attention and that are ignored. The mask already expresses their meaning, or they have
no effect on inference."""


class Attention(Protocol):
    """Computes the attention of all layers in one forward pass. The layers call `attend` in the order of the
    network."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        """Compute one layer's attention. query is [num_tokens, num_heads, head_dim]; key and value are [num_tokens,
        num_kv_heads, head_dim]. All three tensors are contiguous.

        scale, window and soft_cap have the same meaning as in `paged_attention`. The result has the shape of query.
        """


_attention: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def within(attention: Attention) -> Iterator[None]:
    """Makes networks of transformers compute their attention with `attention` while the with block runs."""
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


@dataclass(frozen=True)
class _CausalMask:
    """Describes a causal mask: each token attends to itself and to all earlier tokens. If `window` is given, a token
    attends only to the last `window` tokens, including itself."""

    window: int | None


def _describe_mask(*, config: Any, use_vmap: bool, local_size: int | None = None, **kwargs: Any) -> _CausalMask:
    """Replaces transformers' function that creates a mask tensor. Raises ValueError if the mask is not supported.

    `local_size` is the size of a sliding window or of a chunk. `use_vmap` is true if the network adds a condition to
    the causal mask.
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
    """Called by a layer of transformers. query is [1, num_heads, num_tokens, head_dim]; key and value are [1,
    num_kv_heads, num_tokens, head_dim].

    Returns the attention's output, [1, num_tokens, num_heads, head_dim], and None in place of attention weights.
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
