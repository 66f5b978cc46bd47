"""A key that a native family's reader reads has a type and limits: an odd value changes our logits as it changes
transformers', or a sentence names the key. The keys are those that the readers read; none is listed here."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from test_config_sweep import KNOWN, SMALL, RefusedError, fields_of, ours_of, read, small, theirs_of
from torch.testing import assert_close

from worker_service.models.registry import read_config
from worker_service.read_keys import ReadKeys

ODD: tuple[Any, ...] = ("false", "", True, 0, -1, 2.9, float("nan"), 1e400, 2**63, [], {}, None)
NULLS = {"num_key_value_heads": {"num_key_value_heads": SMALL["num_attention_heads"]}}
"""What null stands for where transformers' code says so, though its types do not have it everywhere."""
OURS_ALONE = ("attn_factor",)
"""Keys that transformers drops."""
LIKE = {"mimo": "qwen2"}
"""Families that transformers does not know, each with one that it does, which they are like."""
SCALED: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [9.0] * 4},
)


def files(family: str) -> Iterator[dict[str, Any]]:
    """Of the family, which make its reader read all that it knows. All kinds of positions have one reader."""
    like = LIKE.get(family, family)
    file = small(like) | {"model_type": family}
    yield file
    if "use_sliding_window" in fields_of(like):
        yield file | {"use_sliding_window": True}
    for rope in SCALED if family == "llama" else SCALED[-1:] if family == "phi3" else ():
        yield file | {"rope_scaling": rope}
    if family == "gemma3_text":
        yield file | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), SCALED[0])}
    if family.startswith("gemma4"):
        proportional = {"rope_type": "proportional", "rope_theta": 99.0, "partial_rotary_factor": 0.5, "factor": 2.0}
        yield file | {"rope_parameters": {"full_attention": proportional, "sliding_attention": {"rope_theta": 77.0}}}


def read_of(file: dict[str, Any]) -> set[tuple[str, ...]]:
    """The path of each key that is read with a type."""
    found: set[tuple[str, ...]] = set()
    read = ReadKeys._value

    def note(keys: ReadKeys, name: str, *arguments: Any) -> Any:
        found.add((*keys._where.split(".")[:-1], name))
        return read(keys, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadKeys, "_value", note)
        read_config(file)
    return found


def changed(file: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *within = path
    return file | {name: changed(file.get(name) or {}, tuple(within), value) if within else value}


def without(file: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *within = path
    rest = {key: value for key, value in file.items() if key != name}
    return rest | {name: without(file.get(name) or {}, tuple(within))} if within else rest


def cases(family: str) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Each key, with the first file of which it is read; those of positions once for each kind of them."""
    seen: set[object] = set()
    for file in files(family):
        scaled = file.get("rope_scaling", {})
        for path in sorted(read_of(file)):
            label = (path, str(scaled.get("rope_type"))) if path[-1] in scaled else path
            if path != ("model_type",) and label not in seen:
                seen.add(label)
                yield file, path


def wrong(file: dict[str, Any], path: tuple[str, ...], value: Any) -> str | None:
    """What is wrong with the answer to this value; None if nothing is."""
    json = changed(file, path, value)
    try:
        read_config(json)
    except ValueError as error:
        return None if path[-1] in str(error) else f"a sentence without its name: {error}"
    except Exception as error:  # any other would be shown without the key
        return f"{type(error).__name__}: {error}"
    if value is None:
        same = NULLS[path[-1]] if path[-1] in NULLS else without(file, path)
        return None if is_taken(json) or is_taken(file | same) else "transformers does not take it"
    if path[-1] in OURS_ALONE:
        return None
    if type(value) is int or len(path) > 1:
        # transformers' classes check no limits, and no values of positions.
        return compared(json, path[-1])
    return None if is_taken(json) else "transformers does not take it"


def is_taken(json: dict[str, Any]) -> bool:
    """Whether transformers' class has no objection. The sweep compares the logits of such files."""
    from transformers import AutoConfig

    try:
        AutoConfig.for_model(**as_known(json))
    except Exception:
        return False
    return True


def as_known(json: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(json) | {"model_type": LIKE.get(json["model_type"], json["model_type"])}


def compared(json: dict[str, Any], name: str) -> str | None:
    """The difference between our logits and transformers', if there is one."""
    made = theirs_of(as_known(json))
    if made is None:
        return "transformers refuses it, or computes no finite numbers"
    try:
        assert_close(ours_of(read(json), made[0]), made[1], atol=1e-3, rtol=1e-3)
    except RefusedError as error:
        return None if name in str(error) else f"a sentence without its name: {error}"
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", sorted([*KNOWN, *LIKE]))
def test_an_odd_value_is_obeyed_as_transformers_obeys_it_or_refused_with_its_key(family: str) -> None:
    found = [
        f"{'.'.join(path)} = {str(value)[:40]!r}: {reason}"
        for file, path in cases(family)
        for value in ODD
        if (reason := wrong(file, path, value)) is not None
    ]
    assert not found, "\n".join(found)
