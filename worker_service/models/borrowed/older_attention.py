"""Paged attention for transformers' code that is older than its attention interface (GPT-J, BLOOM, Falcon).

Such code asks a cache for all keys, multiplies queries by them, changes the scores, and multiplies their softmax by the
values. `KeyCache` returns a `_Keys` in place of the keys. Products and changes of scores are recorded, not computed;
the product with the values calls `attend`. Any operation that is not recorded here raises ValueError, which the survey
turns into a refusal.

A bias by head and key is ALiBi's (Press et al., 2022). The network sees one key more than there are, so that a bias has
at least two keys, whose difference is the head's slope.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from worker_service.models.borrowed.attention import LATER, CausalMask, Softmax, attend

_NOT_KNOWN = "its attention is computed by code of its own: "


class KeyCache:
    """A cache as transformers' layers use it, for one forward pass. It stores nothing: `attend` does."""

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> "tuple[_Keys, Tensor]":
        """key: [1, num_kv_heads, num_tokens, head_dim]."""
        return _Keys(functional.pad(key, (0, 0, 0, 1))), value

    def get_seq_length(self, *_: object) -> int:
        return 0

    def get_query_offset(self, *_: object) -> int:
        return 0

    def get_mask_sizes(self, num_tokens: int, *_: object) -> tuple[int, int]:
        return num_tokens + 1, 0


class _Recorded:
    """Stands in for a tensor in torch's functions."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder: Callable[..., Any] | None = _FUNCTIONS.get(function.__name__.strip("_"))
        if recorder is None:
            raise ValueError(f"{_NOT_KNOWN}{function.__name__}")
        return recorder(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name == "float":  # not a method: the name is a type in annotations
            return lambda: self
        raise ValueError(f"{_NOT_KNOWN}{name}")


class _Keys(_Recorded):
    """keys: with one more at the end."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.shape, self.dtype, self.device = keys.shape, keys.dtype, keys.device

    def size(self, *dim: int) -> Any:
        return self.keys.size(*dim)

    def transpose(self, *dims: int) -> "_Keys":
        return _Keys(self.keys.transpose(*dims))

    def reshape(self, *shape: Any) -> "_Keys":
        return _Keys(self.keys.reshape(*shape))

    view = reshape

    def to(self, *_: object, **__: object) -> "_Keys":
        return self

    def __rmatmul__(self, query: Tensor) -> "_Scores":
        scores: _Scores = _product(query, self)
        return scores


@dataclass(frozen=True)
class _Scores(_Recorded):
    query: Tensor
    """[num_heads, num_tokens, head_dim]."""
    key: Tensor
    """[num_kv_heads, num_tokens, head_dim]."""
    seen: Tensor
    """Has the shape that the network's code knows, and no memory."""
    softmax: Softmax
    is_causal: bool = False
    is_softmax: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.seen.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    def size(self, *dim: int) -> Any:
        return self.seen.size(*dim)

    def view(self, *shape: Any) -> "_Scores":
        return replace(self, seen=self.seen.view(*shape))

    reshape = view

    def to(self, *_: object, **__: object) -> "_Scores":
        return self

    def __mul__(self, factor: float) -> "_Scores":
        slopes = None if self.softmax.slopes is None else self.softmax.slopes * factor
        return replace(self, softmax=replace(self.softmax, scale=self.softmax.scale * factor, slopes=slopes))

    def __truediv__(self, divisor: float) -> "_Scores":
        return self * (1 / divisor)

    def __add__(self, added: "CausalMask | Tensor") -> "_Scores":
        """added: the mask, or ALiBi's bias, [..., 1, num_keys] with a row for each head."""
        if isinstance(added, CausalMask):
            softmax = replace(self.softmax, window=added.window, chunked=added.chunked)
            return replace(self, is_causal=True, softmax=softmax)
        if not isinstance(added, Tensor):
            raise ValueError(LATER)
        num_heads, num_keys = len(self.query), added.shape[-1]
        if added.numel() != num_heads * num_keys or num_keys < 2 or self.softmax.slopes is not None:
            raise ValueError(f"{_NOT_KNOWN}a bias of the shape {tuple(added.shape)}")
        steps = added.reshape(num_heads, num_keys).float()
        # 16 bits round differences, except those next to 0: BLOOM's first bias is 0, MPT's last.
        first, last = steps[:, 1] - steps[:, 0], steps[:, -1] - steps[:, -2]
        slopes = torch.where(steps[:, 0].abs() < steps[:, -1].abs(), first, last)
        return replace(self, softmax=replace(self.softmax, slopes=slopes))

    def __matmul__(self, values: Tensor) -> Tensor:
        return _attended(self, values)

    def masked_fill(self, mask: CausalMask, _: object) -> "_Scores":
        return self + mask


def _product(first: Any, second: Any, **others: Any) -> Any:
    """The product of queries and keys, or of weights and values."""
    if isinstance(first, _Scores) and isinstance(second, Tensor):
        return _attended(first, second)
    if not (isinstance(first, Tensor) and isinstance(second, _Keys)) or others:
        raise ValueError(f"{_NOT_KNOWN}a product of keys")
    query, keys = first.flatten(0, -3), second.keys.transpose(-1, -2).flatten(0, -3)[:, :-1]
    if query.shape[1:] != keys.shape[1:] or len(keys) not in (1, len(query)):
        raise ValueError(f"{_NOT_KNOWN}queries of the shape {tuple(first.shape)}, keys of {tuple(second.shape)}")
    seen = torch.empty((*first.shape[:-1], second.shape[-1]), device="meta")
    return _Scores(query, keys, seen, Softmax(1.0))


def _attended(weights: _Scores, values: Tensor) -> Tensor:
    if not (weights.is_softmax and weights.is_causal):
        raise ValueError(f"{_NOT_KNOWN}it has no causal mask")
    output = attend(weights.query, weights.key, values.flatten(0, -3), weights.softmax)
    return output.transpose(0, 1).reshape(*weights.shape[:-1], values.shape[-1])


def _product_and_bias(added: Tensor, batch1: Tensor, batch2: _Keys, *, beta: float = 1, alpha: float = 1) -> _Scores:
    scores: _Scores = _product(batch1, batch2) * alpha
    return scores + added * beta


def _softmax(scores: _Scores, dim: int = -1, *_: object, **__: object) -> _Scores:
    if dim != -1:
        raise ValueError(f"{_NOT_KNOWN}a softmax over dimension {dim}")
    return replace(scores, is_softmax=True)


def _at_least(scores: _Scores, least: Tensor) -> _Scores:
    """`least`: the smallest number, which only masked scores reach."""
    if least.dim():
        raise ValueError(f"{_NOT_KNOWN}max")
    return scores


def _unchanged(recorded: _Recorded, *_: object, **__: object) -> _Recorded:
    return recorded


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": _product, "bmm": _product, "baddbmm": _product_and_bias, "softmax": _softmax, "max": _at_least,
    "dropout": _unchanged,
}  # fmt: skip


def replace_products(network: Any) -> None:
    """Replace attention that masks scores by a matrix of its own, or asks no cache."""
    if (softmax_of := _WITHOUT_MASK.get(network.config.model_type)) is not None:
        for module in network.modules():
            if hasattr(module, "_attn"):
                module._attn = partial(_attended_at_once, softmax_of(module))


def _attended_at_once(softmax: Softmax, query: Tensor, key: Any, value: Tensor, *_: object) -> list[Tensor | None]:
    """query, value: [1, num_heads, num_tokens, head_dim]; key: the same, or without a cache transposed."""
    keys = key.keys[..., :-1, :] if isinstance(key, _Keys) else key.transpose(-1, -2)
    return [attend(query[0], keys[0], value[0], softmax).transpose(0, 1)[None], None]


_WITHOUT_MASK: dict[str, Callable[[Any], Softmax]] = {
    "gpt_neo": lambda layer: Softmax(1.0, layer.config.window_size if layer.attention_type == "local" else None),
    "gpt_neox_japanese": lambda layer: Softmax(1 / layer.norm_factor),
    "openai-gpt": lambda layer: Softmax((layer.split_size // layer.n_head) ** -0.5 if layer.scale else 1.0),
}
"""The attention of a module, by family."""
