"""Registers this project's paged attention in transformers under the name `NAME`.

transformers asks `_describe_mask` for a mask once for each kind of layer, so its code decides which layers have a
window or chunks. Layers then call `_attend`, or code that is older than this interface (`older_attention`). Both use
the attention given to `within`. Attention other than a scaled softmax over a causal window or chunk raises ValueError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "pagewire"
"""`attn_implementation` of networks."""

LATER = "its tokens attend to later tokens"

_WITHOUT_EFFECT = frozenset(
    {"cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
     "position_ids", "return_dict", "sliding_window", "use_cache"}
)  # fmt: skip
"""Ignored arguments of layers: the mask expresses them, or they have no effect on inference."""


@dataclass(frozen=True)
class Softmax:
    """How a layer's scores become weights. See `paged_attention`."""

    scale: float
    window: int | None = None
    chunked: bool = False
    """Whether tokens attend to their own chunk of `window` tokens, in place of the last `window` tokens."""
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    """[num_heads] float32: what a scaled score loses by each token of distance (ALiBi; Press et al., 2022)."""


class Attention(Protocol):
    """The attention of one forward pass. Layers call `attend` in the order of the network."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """query: [num_heads, num_tokens, head_dim]; key: [num_kv_heads, num_tokens, head_dim]; value: [num_kv_heads,
        num_tokens, value_dim]; any strides. A layer that has no keys and values of its own gives the tensors of an
        earlier layer. Returns [num_tokens, num_heads, value_dim]."""


_attention: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def within(attention: Attention) -> Iterator[None]:
    """Compute the attention of transformers' networks with `attention` in this block."""
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


def attend(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
    """The result of the attention given to `within`. See `Attention.attend`."""
    return _attention.get().attend(query, key, value, softmax)


def rows(part: Tensor, width: int) -> Tensor:
    """part: [heads, num_tokens, at most `width`]. Returns [num_tokens, heads, width], contiguous, filled up with
    zeros."""
    turned = part.transpose(0, 1)
    return (turned if turned.shape[-1] == width else functional.pad(turned, (0, width - turned.shape[-1]))).contiguous()


@dataclass(frozen=True)
class CausalMask:
    """A causal mask. `window`: tokens that a token attends to, including itself; None for all. `chunked`: see
    `Softmax`."""

    window: int | None
    num_tokens: int
    num_keys: int
    chunked: bool = False
    ndim = 0
    """Not that of a tensor: Falcon's code adds ALiBi to such a mask, and a second time to the scores."""

    def __getattr__(self, name: str) -> None:
        raise ValueError("its attention has a mask of its own making")

    def __getitem__(self, index: tuple[object, ...]) -> "CausalMask":
        """The mask of all tokens, which Gemma 4's code takes if all tokens' logits are wanted."""
        if any(part not in (..., slice(None), slice(0, None)) for part in index):
            raise ValueError("its attention has a mask of its own making")
        return self

    def to(self, *_: object) -> "CausalMask":
        return self

    def size(self) -> tuple[int, ...]:
        return (1, 1, self.num_tokens, self.num_keys)


class OpenMask:
    """A mask that is not causal. Networks make one for an encoder, whether there is an encoder or not."""

    def __getattr__(self, name: str) -> None:
        raise ValueError(LATER)


def _describe_mask(
    *, config: Any, use_vmap: bool, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any
) -> "CausalMask | OpenMask":
    """Replaces transformers' function for masks. Raises ValueError for an unsupported mask. local_size: size of a
    window or of a chunk; use_vmap: whether the network adds a condition to the mask."""
    if "allow_is_bidirectional_skip" in kwargs:
        return OpenMask()
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if use_vmap or (local_size is not None and sizes.count(local_size) != 1):
        raise ValueError("its attention has a mask that is neither causal nor a sliding window nor chunks")
    return CausalMask(local_size, q_length, kv_length, chunked=local_size is not None and local_size == sizes[1])


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
    ...]; s_aux: sinks, [num_heads]. Returns [1, num_tokens, num_heads, value_dim], and None in place of weights."""
    del module
    if isinstance(attention_mask, OpenMask):
        raise ValueError(LATER)
    if not isinstance(attention_mask, CausalMask):
        raise ValueError("its attention has a mask of its own making")
    if unknown := sorted(name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None):
        raise ValueError(f"its attention takes {', '.join(unknown)}, which are not supported")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    softmax = Softmax(scale, attention_mask.window, attention_mask.chunked, softcap, sinks)
    return attend(query[0], key[0], value[0], softmax)[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _describe_mask)
