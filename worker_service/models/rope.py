"""Rotary position embeddings, read from a checkpoint's config.json. (Su et al., 2021.)"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_service.read_keys import ReadKeys
from worker_service.wording import shown

ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip
"""What each type of positions is described by, besides `rope_theta` and, in some families, `partial_rotary_factor`."""
_YARN_FACTOR = "attn_factor"
"""Of YaRN's first code: a further factor on cosines and sines. transformers knows none; vLLM has it as here."""
NOTES = ("finetuned",)
"""Keys that tell how a scaled model was made. They change nothing."""
_ORIGINAL = "original_max_position_embeddings"
_LONGEST = 2**31


@dataclass(frozen=True, eq=False)
class Rope:
    """How far each pair of a head turns from one position to the next."""

    inverse_frequencies: Tensor
    """[rotary_dim / 2] float32: radians a position. The part of a head behind rotary_dim does not turn."""
    scale: float = 1.0
    """A factor on cosines and sines."""
    max_positions: int | None = None
    """The longest sequence that these frequencies are for; None for what config.json says without them."""


def read_rope(
    json: ReadKeys,
    head_dim: int,
    default_theta: float = 10_000.0,
    *,
    parts_of_heads: bool = False,
    original: int | None = None,
) -> Rope:
    """Understands `rope_parameters` and the older pair of `rope_theta` and `rope_scaling`.

    default_theta: the family's default; parts_of_heads: whether the family's code obeys `partial_rotary_factor`;
    original: the family's default of the original length, if it has one, which counts unless the top of the file says
    another.
    Raises ValueError for a kind that is not supported.
    """
    newer, older = json.plain.get("rope_parameters") or {}, json.plain.get("rope_scaling") or {}
    if newer and older and newer != older:
        raise ValueError("rope_parameters and rope_scaling say different things")
    parameters = json.get("rope_scaling" if older else "rope_parameters") or ReadKeys({})
    json.without_effect(*(["rope_parameters"] if older else []))  # it is empty or the same
    if not isinstance(parameters, ReadKeys):
        raise ValueError(f"rope_parameters is {shown(parameters)}; it must be an object")
    theta = agreed(parameters, "rope_theta", json, "rope_theta", 2**63) or default_theta
    share = agreed(parameters, "partial_rotary_factor", json, "partial_rotary_factor", 1) if parts_of_heads else None
    return rope_of(parameters, json, head_dim, theta, share or 1.0, original=original)


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
    """parameters: of these positions, but for theta, and for the share of a head that turns. original: as `read_rope`.

    is_scaled_length: whether the family's max_position_embeddings is the length that its scaling leads to.
    """
    if any(isinstance(value, Mapping) for value in parameters.plain.values()):
        raise ValueError("rope_parameters that differ between kinds of layers are not supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters.neutral(type=kind)  # its older name
    if json.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # which Phi-3's first files called so
    if kind not in ROPE_KEYS:
        raise ValueError(f"rope type '{kind}' is not supported; supported are {', '.join(sorted(ROPE_KEYS))}")
    said = {name: parameters[name] for name in ROPE_KEYS[kind] if name in parameters}
    more = parameters.get(_YARN_FACTOR, 1.0) if kind == "yarn" else 1.0
    if type(more) not in (int, float) or not 0 < more < float("inf"):
        raise ValueError(f"{_YARN_FACTOR} is {shown(more)}; it must be above 0")
    if _YARN_FACTOR in parameters and said.get("attention_factor") is not None:
        raise ValueError(f"{_YARN_FACTOR} is {more}, and attention_factor {said['attention_factor']}; say one of them")
    parameters.without_effect(*NOTES)
    parameters.neutral(partial_rotary_factor=1)
    # It may be beside other kinds, and says nothing there.
    original = agreed(parameters, _ORIGINAL, json, _ORIGINAL, _LONGEST, otherwise=original)
    if kind == "default":
        rotary_dim = int(head_dim * share)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return Rope(1.0 / theta**exponents)
    if original:
        said[_ORIGINAL] = original
    frequencies, scale = _scaled(kind, said | {"rope_theta": theta, "partial_rotary_factor": share}, json, head_dim)
    length = int(json["max_position_embeddings"])
    return Rope(frequencies, scale * more, scaled_length(kind, said, length, is_scaled=is_scaled_length))


def scaled_length(kind: str, parameters: Mapping[str, Any], length: int, *, is_scaled: bool = False) -> int:
    """The longest sequence that positions of this kind are for, where max_position_embeddings is `length`.

    Frequencies of "yarn" and "linear" are the same in every text, and made for texts that are `factor` times as long
    as the original ones. Those of "dynamic" change with a text's length beyond `length`, and those of "longrope" beyond
    the original length; cached keys cannot change theirs. With "llama3", `length` is the scaled one, and with others
    too where it `is_scaled`.
    """
    factor, original = parameters.get("factor"), parameters.get(_ORIGINAL)
    if kind == "longrope":
        return min(length, int(original or length))
    if kind not in ("yarn", "linear") or factor is None or is_scaled:
        return length
    return min(int((original or length) * factor), _LONGEST)


def _scaled(kind: str, parameters: Mapping[str, Any], json: ReadKeys, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies, and the factor on cosines and sines, as transformers computes them."""
    # Imported for these kinds only: it takes two seconds.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from worker_service.models.transformers_json import parse

    # They are the same for any family's head of that size. transformers is given nothing but what was read.
    sizes = {name: json[name] for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")}
    rope = {**parameters, "rope_type": kind}
    if kind == "yarn":
        rope.setdefault("factor", None)  # it follows from the lengths then
    network = parse({"model_type": "llama", **sizes, "head_dim": head_dim, "rope_parameters": rope})
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](network)
    return frequencies, float(scale)


def agreed(
    parameters: ReadKeys, inner: str, json: ReadKeys, outer: str, most: int, otherwise: float | None = None
) -> Any:
    """The number that the parameters say under the name `inner`, or the top of the file under the name `outer`, whose
    default is `otherwise`. Raises ValueError where they disagree, or where it is not in (0, most]."""
    found, other = parameters.get(inner), json.get(outer) or otherwise
    if found and other and found != other:
        raise ValueError(f"{outer} is {shown(other)}, and {inner} {shown(found)} among the parameters of positions")
    found = found or other
    if found and not (isinstance(found, int | float) and 0 < found <= most):
        raise ValueError(f"{outer} is {shown(found)}; it must be above 0, and at most {most}")
    return found or None
