"""Reads rotary position embeddings (RoPE; Su et al., 2021) from config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Keys by `rope_type`, besides `rope_theta` and some families' `partial_rotary_factor`."""
_YARN_FACTOR = "attn_factor"
"""A factor on cosines and sines from YaRN's first code, applied as in vLLM; transformers does not support it."""
NOTES = ("finetuned", "max_position_embeddings")
"""Notes on training without effect on inference."""
_ORIGINAL = "original_max_position_embeddings"
_LONGEST = LARGEST
_MAX_PAIRS = 1 << 16
"""Pairs of elements of a head."""
N = TypeVar("N", int, float)


@dataclass(frozen=True, eq=False)
class Rope:
    inverse_frequencies: Tensor
    """[rotary_dim / 2] float32: angle per position of each pair, in radians. The first rotary_dim elements are
    rotated."""
    scale: float = 1.0
    """Factor on cosines and sines."""
    axes: Tensor | None = None
    """[rotary_dim / 2] int64: the axis of positions of each pair, 0, 1 or 2; None with one axis."""
    max_positions: int | None = None
    """Maximum sequence length in tokens; None if unscaled, with config.json's max_position_embeddings as maximum."""


def read_rope(
    json: ReadKeys,
    head_dim: int,
    default_theta: float = 10_000.0,
    *,
    parts_of_heads: bool = False,
    share: float = 1.0,
    original: int | None = None,
    default: Mapping[str, Any] | None = None,
) -> Rope:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`. Raises ValueError if unsupported.
    default_theta, original: the family's defaults of `rope_theta` and `original_max_position_embeddings`. With
    `original`, only the top of config.json counts. default: the family's `rope_parameters`. parts_of_heads: whether
    `partial_rotary_factor` is read, whose default is `share`."""
    newer, older = json.group("rope_parameters"), json.group("rope_scaling")
    if newer.plain and older.plain and newer.plain != older.plain:
        raise ValueError("rope_parameters and rope_scaling differ")
    json.without_effect(*(["rope_parameters"] if older.plain else []))  # empty, or equal to rope_scaling
    parameters = older if older.plain else newer
    if default is not None and not older.plain and json.plain.get("rope_parameters") is None:
        parameters = ReadKeys(default)
    theta = read_theta(parameters, json, "rope_theta", default_theta)
    if parts_of_heads:
        name = "partial_rotary_factor"
        share = _agreed(parameters, name, json, name, lambda keys, name: keys.number(name, None, most=1)) or share
    return rope_of(parameters, json, head_dim, theta, share, original=original)


def read_axial_rope(
    json: ReadKeys,
    head_dim: int,
    default_theta: float = 10_000.0,
    *,
    sections: Sequence[int],
    is_interleaved: bool,
    **options: Any,
) -> Rope:
    """Rotary embeddings by positions in three axes: time, row and column (M-RoPE; Wang et al., 2024). Options: see
    `read_rope`.

    sections: the family's default of `mrope_section`, the number of pairs of each axis. is_interleaved: whether axes
    take turns, so that each has pairs of all frequencies. Tokens of a text have one position in all axes."""
    for name in ("rope_parameters", "rope_scaling"):
        group = json.group(name)
        group.neutral(mrope_interleaved=True if is_interleaved else None)
        sections = group.integers("mrope_section", 3, least=0, most=_MAX_PAIRS) or sections
    rope = read_rope(json, head_dim, default_theta, **options)
    pairs = len(rope.inverse_frequencies)
    if is_interleaved:
        axes = torch.zeros(pairs, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    elif sum(sections) == pairs:
        axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
    else:
        raise ValueError(f"mrope_section is {[*sections]}; its sum must be {pairs}, the pairs of a head")
    return replace(rope, axes=axes)


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
    """Build the `Rope` from `parameters`, with theta and share already read. share: rotated fraction of a head.
    original: see `read_rope`. is_scaled_length: whether max_position_embeddings is the length after scaling."""
    if kinds := [name for name in parameters if name.endswith("_attention")]:
        raise ValueError(f"rope_parameters that differ between kinds of layers are not supported ({named(kinds[0])})")
    # In Phi-3's first config.json files, "su" and "yarn" mean longrope.
    others = ("su", "yarn") if json.plain.get("model_type") == "phi3" else ()
    name = "rope_type" if "rope_type" in parameters else "type"  # "type" is older
    kind = parameters.choice(name, {*ROPE_KEYS, *others}, "default")
    parameters.neutral(type=kind)
    kind = "longrope" if kind in others else kind
    more = parameters.number(_YARN_FACTOR, 1.0) if kind == "yarn" else 1.0
    parameters.without_effect(*NOTES)
    parameters.neutral(partial_rotary_factor=1)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 1:
        raise ValueError(f"partial_rotary_factor is {share}, which rotates no element of a head of {head_dim}")
    pairs = len(range(0, rotary_dim, 2))
    said = {"rope_theta": theta} | _said(kind, parameters, pairs)
    if _YARN_FACTOR in parameters and "attention_factor" in said:
        raise ValueError(
            f"{_YARN_FACTOR} is {more}, and attention_factor {said['attention_factor']}; set only one of them"
        )
    if (length := _original(kind, parameters, json, original)) is not None:
        said[_ORIGINAL] = length
    try:
        frequencies, scale = _scaled(kind, said | {"partial_rotary_factor": share}, json, head_dim)
    except ArithmeticError:
        frequencies, scale = torch.tensor([nan]), nan
    if not (frequencies.isfinite().all() and isfinite(scale) and len(frequencies) == pairs):
        values = ", ".join(f"{name} = {shown(value)}" for name, value in said.items())
        raise ValueError(f"rotary frequencies of type {kind} are not finite with {values}")
    if kind == "default":
        return Rope(frequencies)
    length = scaled_length(kind, said, json.integer("max_position_embeddings"), is_scaled=is_scaled_length)
    if length < 1:
        raise ValueError(f"factor is {shown(said['factor'])}, with which the maximum sequence length is below 1")
    return Rope(frequencies, scale * more, max_positions=length)


def check_truncates(of_kind: Mapping[str, Any]) -> None:
    """Raise ValueError if `truncate` of YaRN would have an effect on one kind of layers. transformers ignores it there.

    of_kind: the parameters of the layers of this kind."""
    if of_kind.get("truncate") is False:
        raise ValueError(
            "truncate is False in the rotary parameters of one kind of layers, where transformers ignores it"
        )


def read_theta(parameters: ReadKeys, json: ReadKeys, outer: str, default: float) -> float:
    """The base of the frequencies, from `parameters` or from the key `outer` at the top."""
    found = _agreed(parameters, "rope_theta", json, outer, lambda keys, name: keys.number(name, None, most=2**63))
    return default if found is None else found


def _said(kind: str, parameters: ReadKeys, pairs: int) -> dict[str, Any]:
    """This type's keys of `ROPE_KEYS` that config.json contains, without `original_max_position_embeddings`."""

    def number_or_none(name: str) -> float | None:
        return parameters.number(name, None, null=None)

    def number_or_0(name: str) -> float | None:
        return parameters.number(name, None, null=None, least=0)

    reads: dict[str, Callable[[str], Any]] = {
        # transformers computes a missing factor from the original and the scaled length.
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
    """The maximum sequence length before scaling."""
    if kind == "default":
        # Read without effect: the type "default" is not scaled.
        for keys in (parameters, json):
            keys.integer(_ORIGINAL, None, null=None)
        return None
    found = _agreed(parameters, _ORIGINAL, json, _ORIGINAL, lambda keys, name: keys.integer(name, None, null=None))
    if default is not None and _ORIGINAL not in json and found not in (None, default):
        raise ValueError(
            f"{_ORIGINAL} is {found} in the rotary parameters; in this family the one at the top of the file "
            f"counts, which is {default} if it is not there: say it at the top, too"
        )
    return default if found is None else found


def scaled_length(kind: str, parameters: Mapping[str, Any], length: int, *, is_scaled: bool = False) -> int:
    """The maximum sequence length with scaling. length: max_position_embeddings; is_scaled: already scaled (yarn,
    linear).

        `yarn, linear`   original length * factor: frequencies do not depend on the sequence's length.
        `dynamic`        `length`: longer sequences need other frequencies, but cached keys cannot be rotated again.
        `longrope`       original length: longer sequences need other frequencies.
        `llama3`         `length`, already scaled.
    """
    factor, original = parameters.get("factor"), parameters.get(_ORIGINAL)
    if kind == "longrope":
        return min(length, int(original or length))
    if kind not in ("yarn", "linear") or factor is None or is_scaled:
        return length
    return min(int((original or length) * factor), _LONGEST)


def _scaled(kind: str, said: Mapping[str, Any], json: ReadKeys, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies, and the factor on cosines and sines, as in transformers."""
    if kind == "default":
        rotary_dim = int(head_dim * said["partial_rotary_factor"])
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / said["rope_theta"] ** exponents, 1.0
    # Imported for scaled types only: the import takes two seconds.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from worker_service.models.config.transformers_json import parse

    # "llama" for all families: frequencies depend on the head size only, and one head always fits the hidden size. All
    # values passed have been checked.
    length = json.integer("max_position_embeddings")
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": length}
    rope = {**said, "rope_type": kind}
    if kind == "yarn":
        rope.setdefault("factor", None)  # transformers computes a missing factor
    network = parse({"model_type": "llama", **sizes, "head_dim": head_dim, "rope_parameters": rope})
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](network)
    return frequencies, float(scale)


def _agreed(
    parameters: ReadKeys, inner: str, json: ReadKeys, outer: str, read: Callable[[ReadKeys, str], N | None]
) -> N | None:
    """The value of `inner` in `parameters`, or of `outer` at the top. Raises ValueError if the two differ."""
    found, other = read(parameters, inner), read(json, outer)
    if found is not None and other is not None and found != other:
        raise ValueError(f"{outer} is {shown(other)}, and {inner} {shown(found)} in the rotary parameters")
    return other if found is None else found
