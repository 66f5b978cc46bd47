"""Reads the rotary position embeddings (RoPE; Su et al., 2021) of a checkpoint from its config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, TypeVar

import torch
from torch import Tensor

from worker_service.read_keys import LARGEST, ReadKeys
from worker_service.wording import named, shown

ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip
"""Keys for each type of rotary embedding (`rope_type`). In addition, all types have the key `rope_theta`, and some
families have `partial_rotary_factor`."""
_YARN_FACTOR = "attn_factor"
"""A key from YaRN's first code: a factor on cosines and sines. vLLM applies this factor in the same way as this module;
transformers does not support the factor."""
NOTES = ("finetuned",)
"""Keys that record how a model with scaled rotary embeddings was trained, and that have no effect on inference."""
_ORIGINAL = "original_max_position_embeddings"
_LONGEST = LARGEST
N = TypeVar("N", int, float)


@dataclass(frozen=True, eq=False)
class Rope:
    """A rotary embedding: the angle by which each pair of elements of a head is rotated per position."""

    inverse_frequencies: Tensor
    """[rotary_dim / 2] float32: the angle per position of each pair, in radians. Only the first rotary_dim elements of
    a head are rotated."""
    scale: float = 1.0
    """Factor by which cosines and sines are multiplied."""
    max_positions: int | None = None
    """Maximum sequence length that these frequencies support, in tokens. None means that the rotary embedding is not
    scaled, and that the maximum is config.json's max_position_embeddings."""


def read_rope(
    json: ReadKeys,
    head_dim: int,
    default_theta: float = 10_000.0,
    *,
    parts_of_heads: bool = False,
    original: int | None = None,
) -> Rope:
    """Read the rotary embedding from the key `rope_parameters`, or from the older keys `rope_theta` and `rope_scaling`.

    default_theta: the family's default of `rope_theta`. parts_of_heads: whether the family's code reads
    `partial_rotary_factor`. original: the family's default of `original_max_position_embeddings`. If a family has a
    default for this key, its code reads the key only at the top of config.json. Raises ValueError if the type of rotary
    embedding is not supported.
    """
    newer, older = json.group("rope_parameters"), json.group("rope_scaling")
    if newer.plain and older.plain and newer.plain != older.plain:
        raise ValueError("rope_parameters and rope_scaling say different things")
    json.without_effect(*(["rope_parameters"] if older.plain else []))  # it is empty, or equals rope_scaling
    parameters = older if older.plain else newer
    theta = read_theta(parameters, json, "rope_theta", default_theta)
    share = 1.0
    if parts_of_heads:
        name = "partial_rotary_factor"
        share = _agreed(parameters, name, json, name, lambda keys, name: keys.number(name, None, most=1)) or share
    return rope_of(parameters, json, head_dim, theta, share, original=original)


def rope_of(
    parameters: ReadKeys,
    json: ReadKeys,
    head_dim: int,
    theta: float,
    share: float = 1.0,
    *,
    original: int | None = None,
    is_scaled_length: bool = False,
) -> Rope:
    """Build the `Rope` from the values in `parameters`. `rope_theta` and `partial_rotary_factor` are given by the
    arguments theta and share.

    share: the fraction of a head's elements that is rotated. original: see `read_rope`. is_scaled_length: whether
    max_position_embeddings is the length after scaling in this family.
    """
    if kinds := [name for name in parameters if name.endswith("_attention")]:
        raise ValueError(f"rope_parameters that differ between kinds of layers are not supported ({named(kinds[0])})")
    # In the first config.json files of Phi-3, the types "su" and "yarn" mean longrope.
    others = ("su", "yarn") if json.plain.get("model_type") == "phi3" else ()
    name = "rope_type" if "rope_type" in parameters else "type"  # "type" is the older name of this key
    kind = parameters.choice(name, {*ROPE_KEYS, *others}, "default")
    parameters.neutral(type=kind)
    kind = "longrope" if kind in others else kind
    more = parameters.number(_YARN_FACTOR, 1.0) if kind == "yarn" else 1.0
    parameters.without_effect(*NOTES)
    parameters.neutral(partial_rotary_factor=1)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 1:
        raise ValueError(f"partial_rotary_factor is {share}, and no number of a head of {head_dim} would turn")
    pairs = len(range(0, rotary_dim, 2))
    said = {"rope_theta": theta} | _said(kind, parameters, pairs)
    if _YARN_FACTOR in parameters and "attention_factor" in said:
        raise ValueError(f"{_YARN_FACTOR} is {more}, and attention_factor {said['attention_factor']}; say one of them")
    if (length := _original(kind, parameters, json, original)) is not None:
        said[_ORIGINAL] = length
    try:
        frequencies, scale = _scaled(kind, said | {"partial_rotary_factor": share}, json, head_dim)
    except ArithmeticError:
        frequencies, scale = torch.tensor([nan]), nan
    if not (frequencies.isfinite().all() and isfinite(scale) and len(frequencies) == pairs):
        values = ", ".join(f"{name} = {shown(value)}" for name, value in said.items())
        raise ValueError(f"positions of type {kind} are not finite numbers with {values}")
    if kind == "default":
        return Rope(frequencies)
    length = scaled_length(kind, said, json.integer("max_position_embeddings"), is_scaled=is_scaled_length)
    if length < 1:
        raise ValueError(f"factor is {shown(said['factor'])}, with which positions are for texts of no token")
    return Rope(frequencies, scale * more, length)


def read_theta(parameters: ReadKeys, json: ReadKeys, outer: str, default: float) -> float:
    """Read the base of the rotary frequencies: from `parameters`, or from the key `outer` at the top of config.json."""
    found = _agreed(parameters, "rope_theta", json, outer, lambda keys, name: keys.number(name, None, most=2**63))
    return default if found is None else found


def _said(kind: str, parameters: ReadKeys, pairs: int) -> dict[str, Any]:
    """The values of this type's keys in `ROPE_KEYS` that config.json contains, except
    `original_max_position_embeddings`."""

    def number_or_none(name: str) -> float | None:
        return parameters.number(name, None, null=None)

    def number_or_0(name: str) -> float | None:
        return parameters.number(name, None, null=None, least=0)

    reads: dict[str, Callable[[str], Any]] = {
        # If the factor is missing, transformers computes it from the original and the scaled length.
        "factor": number_or_none if kind in ("yarn", "longrope") else parameters.number,
        "low_freq_factor": parameters.number,
        "high_freq_factor": parameters.number,
        "attention_factor": number_or_none,
        "beta_fast": number_or_none,
        "beta_slow": number_or_none,
        "mscale": number_or_0,
        "mscale_all_dim": number_or_0,
        "truncate": lambda name: parameters.boolean(name, None),
        "short_factor": lambda name: parameters.numbers(name, pairs),
        "long_factor": lambda name: parameters.numbers(name, pairs),
    }
    found = {name: reads[name](name) for name in ROPE_KEYS[kind] if name != _ORIGINAL}
    return {name: value for name, value in found.items() if value is not None}


def _original(kind: str, parameters: ReadKeys, json: ReadKeys, default: int | None) -> int | None:
    """The model's maximum sequence length before its rotary embedding was scaled."""
    if kind == "default":
        # The keys are read but have no effect, because rotary embeddings of the type "default" are not scaled.
        for keys in (parameters, json):
            keys.integer(_ORIGINAL, None, null=None)
        return None
    found = _agreed(parameters, _ORIGINAL, json, _ORIGINAL, lambda keys, name: keys.integer(name, None, null=None))
    if default is not None and _ORIGINAL not in json and found not in (None, default):
        raise ValueError(
            f"{_ORIGINAL} is {found} among the parameters of positions; in this family the one at the top of the file "
            f"counts, which is {default} if it is not there: say it at the top, too"
        )
    return default if found is None else found


def scaled_length(kind: str, parameters: Mapping[str, Any], length: int, *, is_scaled: bool = False) -> int:
    """The maximum sequence length with a rotary embedding of this type. length: max_position_embeddings in config.json.

        `yarn, linear`   The original length * factor, because the frequencies do not depend on the sequence's length.
        `dynamic`        `length`. Longer sequences would need other frequencies, but cached keys cannot be rotated
        again.
        `longrope`       The original length, because longer sequences would need other frequencies.
        `llama3`         `length`, which is the length after scaling.

    If `is_scaled` is true, `length` is already the length after scaling for the types yarn and linear.
    """
    factor, original = parameters.get("factor"), parameters.get(_ORIGINAL)
    if kind == "longrope":
        return min(length, int(original or length))
    if kind not in ("yarn", "linear") or factor is None or is_scaled:
        return length
    return min(int((original or length) * factor), _LONGEST)


def _scaled(kind: str, said: Mapping[str, Any], json: ReadKeys, head_dim: int) -> tuple[Tensor, float]:
    """Returns the rotary frequencies, and the factor on cosines and sines, as transformers computes them."""
    if kind == "default":
        rotary_dim = int(head_dim * said["partial_rotary_factor"])
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / said["rope_theta"] ** exponents, 1.0
    # transformers is imported only for scaled types, because its import takes two seconds.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from worker_service.models.config.transformers_json import parse

    # The model type "llama" is used for all families, because the frequencies depend on the head size, not on the
    # family. transformers receives only values that this module has checked.
    sizes = {name: json.integer(name) for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")}
    rope = {**said, "rope_type": kind}
    if kind == "yarn":
        rope.setdefault("factor", None)  # transformers computes a missing factor from the lengths
    network = parse({"model_type": "llama", **sizes, "head_dim": head_dim, "rope_parameters": rope})
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](network)
    return frequencies, float(scale)


def _agreed(
    parameters: ReadKeys, inner: str, json: ReadKeys, outer: str, read: Callable[[ReadKeys, str], N | None]
) -> N | None:
    """The value of the key `inner` in `parameters`, or of the key `outer` at the top of config.json. Raises ValueError
    if the file has both keys and their values differ."""
    found, other = read(parameters, inner), read(json, outer)
    if found is not None and other is not None and found != other:
        raise ValueError(f"{outer} is {shown(other)}, and {inner} {shown(found)} among the parameters of positions")
    return other if found is None else found
