"""The keys of a GGUF file, each taken by the code that obeys it: a key that no code took is refused.

LEFT_OUT has the keys that change no answer, each with the reason.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from worker_service.loading.gguf_header import Value
from worker_service.wording import named, shown

T = TypeVar("T", bool, int, float, str)

LEFT_OUT = {
    r"general\.(?!architecture$|type$|sampling\.).*": "names, authors, licences and the like; how the file is laid out",
    r"quantize\..*|imatrix\..*": "how the weights were quantised",
    r".*\.rope\.scaling\.finetuned": "whether the model was trained with scaled positions: they are the same",
    r"tokenizer\.ggml\.(fim_(pre|suf|mid)|prefix|suffix|middle)_token_id": "for infilling, which is no call here",
}
"""Patterns of whole keys, with the reason why no code takes them."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),  # llama.cpp takes 32, whatever the file says
    "rope.scaling.yarn_beta_slow": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys of an architecture, with the values that mean what the networks here do without them."""
_NEUTRAL_OF_TOKENIZERS: dict[str, tuple[object, ...]] = {
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.token_type_count": (0, 1),
}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_MOST_SHOWN = 8


class GgufKeys:
    """The values by their keys. All methods raise ValueError with the second half of a sentence."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self._metadata = metadata
        self._taken: set[str] = set()
        self.architecture = self.need("general.architecture", str)

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a key, or None if the key is missing. An integer is accepted as a float."""
        self._taken.add(key)
        value: Any = self._metadata.get(key)
        if value is None and key not in self._metadata:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is float and not np.isfinite(value)):
            raise ValueError(f"its {named(key)} is {shown(value)}; it must be {_KINDS[kind]}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """A value that must be there."""
        if (value := self.get(key, kind)) is None:
            raise ValueError(f"it has no {key}")
        return value

    def own(self, key: str, kind: type[T]) -> T | None:
        """As `get`, of a key of the architecture, named without it."""
        return self.get(f"{self.architecture}.{key}", kind)

    def need_own(self, key: str, kind: type[T]) -> T:
        """As `need`, of a key of the architecture."""
        return self.need(f"{self.architecture}.{key}", kind)

    def of_all_layers(self, key: str) -> int | None:
        """A whole number of the architecture that may be written once a layer; None where it is not there."""
        values = self._metadata.get(f"{self.architecture}.{key}")
        if not isinstance(values, np.ndarray):
            return self.own(key, int)
        found = self.numbers(f"{self.architecture}.{key}")
        if not len(found) or (found != found[0]).any():
            raise ValueError(f"its {self.architecture}.{key} differs from layer to layer, which is not supported")
        return int(found[0])

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """An array of numbers; empty where there is none."""
        self._taken.add(key)
        values = self._metadata.get(key)
        if values is None and key not in self._metadata:
            return np.zeros(0, np.int32)
        if not isinstance(values, np.ndarray):
            raise ValueError(f"its {named(key)} is {shown(values)}; it must be an array of numbers")
        return values

    def texts(self, key: str) -> list[str]:
        """An array of texts; empty where there is none."""
        self._taken.add(key)
        values = self._metadata.get(key)
        if values is None and key not in self._metadata:
            return []
        if not isinstance(values, list):
            raise ValueError(f"its {named(key)} is {shown(values)}; it must be an array of texts")
        return values

    def leave(self, *keys: str) -> None:
        """Keys that mean nothing beside others that were taken, such as merges beside scores."""
        self._taken.update(keys)

    def refuse_leftovers(self) -> None:
        """Raises ValueError for a key that no code took, unless it may be left out."""
        neutral = {f"{self.architecture}.{key}": values for key, values in _NEUTRAL.items()} | _NEUTRAL_OF_TOKENIZERS
        left: list[str] = []
        for key in sorted(self._metadata.keys() - self._taken):
            value = self._metadata[key]
            if key in neutral:
                if not (isinstance(value, bool | int | float | str) and value in neutral[key]):
                    allowed = " or ".join(map(shown, neutral[key]))
                    raise ValueError(f"its {named(key)} is {shown(value)}; supported is {allowed}")
            elif not any(re.fullmatch(pattern, key) for pattern in LEFT_OUT):
                left.append(named(key))
        if left:
            more = f" and {len(left) - _MOST_SHOWN} more" if len(left) > _MOST_SHOWN else ""
            raise ValueError(
                f"its {', '.join(left[:_MOST_SHOWN])}{more} is not known for the architecture {self.architecture}, and "
                "might change answers"
            )
