"""Rotary position embeddings, read from a checkpoint's config.json. (Su et al., 2021.)"""

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
"""Keys of each type of positions. In addition, all types have `rope_theta`, and some families have
`partial_rotary_factor`."""
_YARN_FACTOR = "attn_factor"
"""A factor on cosines and sines from YaRN's first code. vLLM applies this factor in the same way; transformers does not
support it."""
NOTES = ("finetuned",)
"""Keys that record how a scaled model was trained. These keys have no effect."""
_ORIGINAL = "original_max_position_embeddings"
_LONGEST = LARGEST
N = TypeVar("N", int, float)


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of a head: the angle of each pair of numbers, per position."""

    inverse_frequencies: Tensor
    """[rotary_dim / 2] float32: radians per position. Only the first rotary_dim numbers of a head are rotated."""
    scale: float = 1.0
    """Factor on cosines and sines."""
    max_positions: int | None = None
    """Maximum sequence length for the frequencies, in tokens. None means that positions are not scaled, and that
    config.json's length is the maximum."""


def read_rope(
    json: ReadKeys,
    head_dim: int,
    default_theta: float = 10_000.0,
    *,
    parts_of_heads: bool = False,
    original: int | None = None,
) -> Rope:
    """Read `rope_parameters`, or the older pair `rope_theta` and `rope_scaling`.

    default_theta: the family's default. parts_of_heads: whether the family's code reads `partial_rotary_factor`.
    original: the family's default for the original length. If a family has a default original length, its code reads
    another original length only from the top of the file. Raises ValueError for an unsupported type.
    """
    newer, older = json.group("rope_parameters"), json.group("rope_scaling")
    if newer.plain and older.plain and newer.plain != older.plain:
        raise ValueError("rope_parameters and rope_scaling say different things")
    json.without_effect(*(["rope_parameters"] if older.plain else []))  # empty, or equal to rope_scaling
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
    """The `Rope` for the values in `parameters`, except theta and share, which are arguments.

    share: the part of a head that is rotated, 1 for all. original: see `read_rope`. is_scaled_length: whether the
    family's max_position_embeddings is the length after scaling.
    """
    if kinds := [name for name in parameters if name.endswith("_attention")]:
        raise ValueError(f"rope_parameters that differ between kinds of layers are not supported ({named(kinds[0])})")
    # In Phi-3's first files, "su" and "yarn" mean longrope.
    others = ("su", "yarn") if json.plain.get("model_type") == "phi3" else ()
    name = "rope_type" if "rope_type" in parameters else "type"  # the key's older name
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
    """The base of the positions: from `parameters`, or from the top of the file under the name `outer`."""
    found = _agreed(parameters, "rope_theta", json, outer, lambda keys, name: keys.number(name, None, most=2**63))
    return default if found is None else found


def _said(kind: str, parameters: ReadKeys, pairs: int) -> dict[str, Any]:
    """The values of all keys in `ROPE_KEYS` that are present, except the original length."""

    def number_or_none(name: str) -> float | None:
        return parameters.number(name, None, null=None)

    def number_or_0(name: str) -> float | None:
        return parameters.number(name, None, null=None, least=0)

    reads: dict[str, Callable[[str], Any]] = {
        # A missing factor is computed from the lengths.
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
    """The model's maximum text length before positions were scaled."""
    if kind == "default":
        # The original length has no effect without scaling.
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
    """The maximum sequence length for positions of this type. length: the file's max_position_embeddings.

        `yarn, linear`   original length * factor; the frequencies are equal for all texts.
        `dynamic`        `length`; longer texts would need other frequencies, but cached keys cannot be rotated again.
        `longrope`       the original length; longer texts would need other frequencies.
        `llama3`         `length`, which is the scaled length.

    If `is_scaled`, `length` is already the scaled length for yarn and linear.
    """
    factor, original = parameters.get("factor"), parameters.get(_ORIGINAL)
    if kind == "longrope":
        return min(length, int(original or length))
    if kind not in ("yarn", "linear") or factor is None or is_scaled:
        return length
    return min(int((original or length) * factor), _LONGEST)


def _scaled(kind: str, said: Mapping[str, Any], json: ReadKeys, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies, and the factor on cosines and sines, as transformers computes them."""
    if kind == "default":
        rotary_dim = int(head_dim * said["partial_rotary_factor"])
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / said["rope_theta"] ** exponents, 1.0
    # Imported only for scaled types, because the import takes two seconds.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from worker_service.models.config.transformers_json import parse

    # The frequencies depend on the head size, not on the family. transformers receives only values that were checked
    # here.
    sizes = {name: json.integer(name) for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")}
    rope = {**said, "rope_type": kind}
    if kind == "yarn":
        rope.setdefault("factor", None)  # transformers computes the factor from the lengths
    network = parse({"model_type": "llama", **sizes, "head_dim": head_dim, "rope_parameters": rope})
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](network)
    return frequencies, float(scale)


def _agreed(
    parameters: ReadKeys, inner: str, json: ReadKeys, outer: str, read: Callable[[ReadKeys, str], N | None]
) -> N | None:
    """The value of `inner` in the parameters, or of `outer` at the top of the file. Raises ValueError if both are
    present and differ."""
    found, other = read(parameters, inner), read(json, outer)
    if found is not None and other is not None and found != other:
        raise ValueError(f"{outer} is {shown(other)}, and {inner} {shown(found)} among the parameters of positions")
    return other if found is None else found
