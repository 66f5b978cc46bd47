"""Reads the keys of a GGUF file, and refuses a file with unread keys that may change outputs. Keys of the network begin
with the architecture's name. Unknown first parts (`mradermacher.quantized_by`) are notes."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from worker_service.loading.gguf.header import Value
from worker_service.loading.gguf.kinds import TEXT, Kind, T
from worker_service.wording import named, shown

LEFT_OUT = {
    r"general\.(?!architecture$|type$|sampling\.).*": "names, authors, licences and the like; how the file is laid out",
    r"quantize\..*": "how the weights were quantised",
    r".*\.rope\.scaling\.finetuned": "whether the model was trained with scaled positions: they are the same",
    r"tokenizer\.ggml\.(fim_(pre|suf|mid)|prefix|suffix|middle)_token_id": "for infilling, which is no call here",
    r"tokenizer\.huggingface\.json": "the tokenizer once more, for other programs",
}
"""Patterns of whole keys that do not change outputs, with reasons."""
_RESERVED = ("general", "tokenizer", "split", "quantize")
"""First parts of keys that GGUF defines, besides the architecture's name."""

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
    "rope.scaling.yarn_beta_fast": (32,),  # llama.cpp ignores this key and uses 32
    "rope.scaling.yarn_beta_slow": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys without the architecture's name, with the values that have no effect. Other values are refused."""
_NEUTRAL_OF_TOKENIZERS: dict[str, tuple[object, ...]] = {
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.token_type_count": (0, 1),
}
_MAX_SHOWN = 8


class GgufKeys:
    """Methods raise a ValueError without the file's name, which the caller adds."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self._metadata = metadata
        self._taken: set[str] = set()
        self.architecture = self.need("general.architecture", TEXT)

    def get(self, key: str, kind: Kind[T]) -> T | None:
        """The value of a key; None if missing."""
        self._taken.add(key)
        if key not in self._metadata:
            return None
        if (value := kind.read(self._metadata[key])) is None:
            raise ValueError(f"its {named(key)} is {shown(self._metadata[key])}; it must be {kind.title}")
        return value

    def need(self, key: str, kind: Kind[T]) -> T:
        """The value of a required key."""
        if (value := self.get(key, kind)) is None:
            raise ValueError(f"it has no {named(key)}")
        return value

    def own(self, key: str, kind: Kind[T]) -> T | None:
        """`get` for the key with the architecture's name in front."""
        return self.get(f"{self.architecture}.{key}", kind)

    def need_own(self, key: str, kind: Kind[T]) -> T:
        """`need` for the key with the architecture's name in front."""
        return self.need(f"{self.architecture}.{key}", kind)

    def of_all_layers(self, key: str, kind: Kind[int]) -> int | None:
        """One number, or an array with equal numbers for all layers; None if missing."""
        key = f"{self.architecture}.{key}"
        if not self.is_array(key):
            return self.get(key, kind)
        found = self.numbers(key, kind)
        if not len(found) or (found != found[0]).any():
            raise ValueError(f"its {named(key)} differs from layer to layer, which is not supported")
        return int(found[0])

    def is_array(self, key: str) -> bool:
        return isinstance(self._metadata.get(key), np.ndarray)

    def numbers(self, key: str, kind: Kind[Any]) -> npt.NDArray[Any]:
        """An array of numbers; empty if missing."""
        self._taken.add(key)
        if key not in self._metadata:
            return np.zeros(0, np.int32)
        values = self._metadata[key]
        if not isinstance(values, np.ndarray):
            raise ValueError(f"its {named(key)} is {shown(values)}; it must be an array of numbers")
        if len(wrong := kind.wrong(values)):
            raise ValueError(f"its {named(key)} has {shown(wrong[0].item())}; each entry must be {kind.title}")
        return values

    def texts(self, key: str) -> list[str]:
        """An array of texts; empty if missing."""
        self._taken.add(key)
        if key not in self._metadata:
            return []
        values = self._metadata[key]
        if not isinstance(values, list):
            raise ValueError(f"its {named(key)} is {shown(values)}; it must be an array of texts")
        return values

    def names(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, without it, in the file's order."""
        return [key.removeprefix(prefix) for key in self._metadata if key.startswith(prefix)]

    def leave(self, *keys: str) -> None:
        """Mark keys without effect in this file as read, such as merges beside scores."""
        self._taken.update(keys)

    def refuse_leftovers(self) -> None:
        """Raise ValueError if an unread key may change outputs."""
        neutral = {f"{self.architecture}.{key}": values for key, values in _NEUTRAL.items()} | _NEUTRAL_OF_TOKENIZERS
        left: list[str] = []
        for key in sorted(self._metadata.keys() - self._taken):
            value = self._metadata[key]
            if key in neutral and not isinstance(value, np.ndarray):
                if not any(value == one and (type(value) is bool) == (type(one) is bool) for one in neutral[key]):
                    allowed = " or ".join(map(shown, neutral[key]))
                    raise ValueError(f"its {named(key)} is {shown(value)}; supported is {allowed}")
            elif key.split(".")[0] in (*_RESERVED, self.architecture) and not _may_be_left(key):
                left.append(named(key))
        if left:
            more = f" and {len(left) - _MAX_SHOWN} more" if len(left) > _MAX_SHOWN else ""
            raise ValueError(
                f"its {', '.join(left[:_MAX_SHOWN])}{more} is not known for the architecture {self.architecture}, and "
                "might change answers"
            )


def _may_be_left(key: str) -> bool:
    return any(re.fullmatch(pattern, key, re.DOTALL) for pattern in LEFT_OUT)
