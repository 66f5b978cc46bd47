"""Every value of a key that is read is obeyed, or refused by a sentence that names the key."""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp_cases import TOKENIZERS
from small_gguf import EXPERTS, HEAD, INNER, keys_of, number_of_layers, shapes_of

pytest.importorskip("gguf")

from worker_service.loading.gguf.config import read_network
from worker_service.loading.gguf.keys import GgufKeys
from worker_service.loading.gguf.sampling import read_sampling
from worker_service.loading.gguf.tokenizer import convert_tokenizer

Json = dict[str, Any]

SIZES = {"llama": 0, "llama with experts": EXPERTS, "gemma2": 0, "gemma3": 0, "phi3": 0, "qwen3moe": EXPERTS}
"""Experts of each network."""
MORE = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope.freq_base_swa": 10_000.0},
    "gemma3": {"final_logit_softcapping": 30.0, "rope.freq_base_swa": 10_000.0, "attention.sliding_window": 16},
    "phi3": {"attention.sliding_window": 16},
    "qwen3moe": {"expert_feed_forward_length": INNER},
}
SCALED = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.attn_factor": 1.5,
    "rope.dimension_count": HEAD,
}
SAMPLING: Json = {"temp": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.5}
SAMPLING |= {"mirostat": 0, "xtc_probability": 0.0, "penalty_last_n": -1, "xtc_threshold": 0.5, "mirostat_eta": 0.5}

ZERO_IS_NOT_SAID = ("feed_forward_length", "expert_feed_forward_length", "rope.scaling.original_context_length")
ZERO_IS_NOT_SAID += ("rope.scaling.factor", "attention.sliding_window", "final_logit_softcapping", "expert_count")
ZERO_IS_NOT_SAID += ("mirostat", "xtc_probability")
"""Keys whose 0 means to llama.cpp what a file without the key means, or what is there already."""
OFF = ("xtc_threshold", "mirostat_eta")
"""Settings of methods that are off."""


@cache
def sound_keys(name: str) -> Mapping[str, Any]:
    """The metadata of a network with a value for all keys that its reader knows."""
    architecture = name.split()[0]
    own = MORE.get(architecture, {}) | ({} if architecture == "gemma3" else SCALED)
    if experts := SIZES[name]:
        own |= {"expert_count": experts, "expert_used_count": 2}
    keys = keys_of(architecture, number_of_layers(architecture), HEAD)
    return {
        "general.architecture": architecture,
        **keys,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        **{f"general.sampling.{key}": value for key, value in SAMPLING.items()},
    }


def read(name: str, metadata: Mapping[str, Any]) -> Json:
    keys = GgufKeys(metadata)
    architecture = name.split()[0]
    tensors = shapes_of(architecture, number_of_layers(architecture), HEAD, SIZES[name] > 0)
    network = read_network(keys, tensors, {}, metadata[f"{architecture}.vocab_size"])
    return network | read_sampling(keys)


def outcome(name: str, metadata: Mapping[str, Any]) -> Json | str:
    """What is read, or why it is refused."""
    try:
        return read(name, metadata)
    except ValueError as refusal:
        return str(refusal)


def numbers_of(name: str) -> list[str]:
    return [
        key
        for key, value in sound_keys(name).items()
        if isinstance(value, int | float) and not key.startswith("tokenizer.")
    ]


@pytest.mark.parametrize("name", SIZES)
def test_no_number_of_a_network_is_of_another_type_or_endless(name: str) -> None:
    assert len(numbers_of(name)) > 20
    for key in numbers_of(name):
        for value in (math.nan, math.inf, -math.inf, "7", True, np.array([1.5]), np.array([True]), ["7"], None):
            with pytest.raises(ValueError, match=key.removeprefix(f"{name.split()[0]}.")) as refusal:
                read(name, {**sound_keys(name), key: value})
            assert "it must be" in str(refusal.value) or "each entry must be" in str(refusal.value)


@pytest.mark.parametrize("name", SIZES)
def test_a_number_at_or_below_zero_is_obeyed_or_refused_by_its_key(name: str) -> None:
    """Never taken for one that is missing, unless llama.cpp does so."""
    for key in numbers_of(name):
        short = key.removeprefix("general.sampling.").removeprefix(f"{name.split()[0]}.")
        for value in (0, 0.0, -1, -0.5, 2**31):
            found = outcome(name, {**sound_keys(name), key: value})
            if isinstance(found, str):
                assert short in found
                continue
            if value != sound_keys(name)[key] and short not in (*OFF, *(ZERO_IS_NOT_SAID if value == 0 else ())):
                without = {one: said for one, said in sound_keys(name).items() if one != key}
                assert found not in (outcome(name, sound_keys(name)), outcome(name, without)), (key, value)


def test_llama_cpp_has_no_answer_where_these_are_refused() -> None:
    """With each of these values xllamacpp 2026.10.11549 answers NaN, the same for all tokens, or not at all."""
    for name, key, value in (
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "final_logit_softcapping", 0.0),
        ("gemma2", "attention.sliding_window", 0),
        ("gemma3", "rope.freq_base_swa", 0.0),
        ("llama", "rope.freq_base", 0.0),
        ("llama", "rope.freq_base", -1.0),
        ("llama", "attention.key_length", 0),
        ("llama", "attention.head_count_kv", 0),
        ("phi3", "rope.dimension_count", 0),
        ("llama", "attention.layer_norm_rms_epsilon", -0.5),
    ):
        with pytest.raises(ValueError, match=rf"its {name}\.{key} is {value}; it must be a"):
            read(name, {**sound_keys(name), f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"attention.head_count_kv": 3}, "head_count, 4, is no multiple of its attention.head_count_kv, 3"),
        ({"expert_used_count": 5}, "expert_used_count is 5, and its expert_count 4"),
        ({"attention.head_count": np.array([1.7, 1.7])}, "attention.head_count has 1.7; each entry must be a whole"),
        ({"attention.head_count": np.array([0, 0])}, "attention.head_count has 0; each entry must be a whole number"),
        ({"attention.key_length": 2**40}, "attention.key_length is 1099511627776; it must be a whole number from 1 to"),
        ({"rope.scaling.type": ""}, "rope.scaling.type is ''; supported are none, linear, yarn, longrope"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(own: Json, reason: str) -> None:
    name = "llama with experts"
    with pytest.raises(ValueError, match=reason):
        read(name, {**sound_keys(name), **{f"llama.{key}": value for key, value in own.items()}})


def test_a_window_for_each_layer_is_true_or_false() -> None:
    pattern = "gemma3.attention.sliding_window_pattern"
    found = read("gemma3", {**sound_keys("gemma3"), pattern: np.array([True, False] * 3)})
    assert found["layer_types"] == ["sliding_attention", "full_attention"] * 3
    for values in (np.array([2, 0] * 3), np.array([0.5] * 6), np.array([True])):
        with pytest.raises(ValueError, match="sliding_window_pattern has"):
            read("gemma3", {**sound_keys("gemma3"), pattern: values})


@pytest.mark.parametrize(
    ("key", "value"),
    [("temp", -1.0), ("temp", 101.0), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1), ("penalty_repeat", 0.0)],
)
def test_a_recommendation_that_no_request_might_make_is_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"its general\.sampling\.{key} is {value}; it must be a number"):
        read_sampling(GgufKeys({"general.architecture": "llama", f"general.sampling.{key}": value}))


def test_every_token_is_a_candidate_from_a_top_k_of_0_down() -> None:
    for value in (0, -1):
        keys = GgufKeys({"general.architecture": "llama", "general.sampling.top_k": value})
        assert read_sampling(keys) == {"do_sample": True, "top_k": 0}


def tokenizer(name: str, folder: Path, **changes: Any) -> Json:
    """Of this kind, with these changes: what tokenizer.json says."""
    said = TOKENIZERS[name] | {"add_bos_token": True, "bos_token_id": 1} | changes
    arrays = {key: np.array(said[key]) for key in ("token_type", "scores") if key in said}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (said | arrays).items()}
    convert_tokenizer(GgufKeys({"general.architecture": "llama", **metadata}), len(said["tokens"]), folder)
    content: Json = json.loads((folder / "tokenizer.json").read_text())
    return content


@pytest.mark.parametrize("wrong", [7, 99, -1, 1.5, True])
def test_a_token_of_no_known_type_is_refused(wrong: Any, tmp_path: Path) -> None:
    types = TOKENIZERS["llama"]["token_type"]
    wrong_types = [wrong, *types[1:]] if type(wrong) is not bool else [wrong] * len(types)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.token_type has .*; each entry must be a type of tokens"):
        tokenizer("llama", tmp_path, token_type=wrong_types)


def test_a_score_is_a_number(tmp_path: Path) -> None:
    scores = TOKENIZERS["llama"]["scores"]
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.scores has {wrong}; each entry must be a number"):
            tokenizer("llama", tmp_path, scores=[wrong, *scores[1:]])
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores has False; each entry must be a number"):
        tokenizer("llama", tmp_path, scores=[False] * len(scores))


def test_of_a_pair_that_is_there_twice_the_first_counts(tmp_path: Path) -> None:
    """As in llama.cpp; the tokenizers' library would take the last."""
    merges = TOKENIZERS["gpt2, gpt-2"]["merges"]
    content = tokenizer("gpt2, gpt-2", tmp_path, merges=[*merges, merges[0]])
    assert content["model"]["merges"][0] == merges[0].split(" ")
    assert len(content["model"]["merges"]) == len(merges)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["a" * 1_025], "tokenizer.ggml.tokens has the token 'aaa.*aaa' of 1025 bytes; at most 1024 are supported"),
        (["ü" * 1_000_000], "of 2000000 bytes; at most 1024 are supported"),
        ([f"{number:1020}" for number in range(8_300)], "tokens have 84.* bytes together; at most 8388608"),
        (["a" * length for length in range(1, 1_025)], "that form other tokens have more than"),
    ],
)
def test_tokens_that_would_take_minutes_are_refused_by_their_lengths(
    tokens: list[str], reason: str, tmp_path: Path
) -> None:
    """A token of a megabyte took hours: all its halves were looked for."""
    with pytest.raises(ValueError, match=reason):
        tokenizer("llama", tmp_path, tokens=tokens, scores=[0.0] * len(tokens), token_type=[1] * len(tokens))


def test_notes_of_publishers_are_left_out() -> None:
    """Keys under a name of their own. Those under names that the format knows are refused."""
    notes = {f"mradermacher.{key}": "x" for key in ("quantize_version", "quantized_by", "convert_type")}
    notes |= {"quantize.imatrix.file": "x", "imatrix.chunks": 7, "qwen2.rope.freq_base": 1.0, "note": True}
    notes |= {"general.quantized_by": "x", "general.base_model.0.name": "x", "general.tags": ["x"]}
    notes |= {"tokenizer.huggingface.json": "{}"}
    GgufKeys({"general.architecture": "llama", **notes}).refuse_leftovers()
    for key in ("llama.note", "tokenizer.ggml.note", "tokenizer.note", "split.note", "general.sampling.note"):
        with pytest.raises(ValueError, match=rf"its {key} is not known for the architecture llama"):
            GgufKeys({"general.architecture": "llama", key: "x"}).refuse_leftovers()


@pytest.mark.parametrize(("key", "value"), [("attention.clamp_kqv", False), ("expert_weights_norm", 1)])
def test_a_neutral_value_is_of_the_right_type(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"its llama\.{key} is {value}; supported is"):
        GgufKeys({"general.architecture": "llama", f"llama.{key}": value}).refuse_leftovers()


def test_a_template_that_no_list_names_is_kept(tmp_path: Path) -> None:
    own = {"chat_template": "{{ 1 }}", "chat_template.rag": "{{ 2 }}"}
    keys = TOKENIZERS["gpt2, gpt-2"]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata |= {f"tokenizer.{key}": value for key, value in own.items()} | {"general.architecture": "llama"}
    metadata["tokenizer.ggml.token_type"] = np.array(keys["token_type"])
    convert_tokenizer(GgufKeys(metadata), len(keys["tokens"]), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {one["name"]: one["template"] for one in config["chat_template"]} == {"default": "{{ 1 }}", "rag": "{{ 2 }}"}
