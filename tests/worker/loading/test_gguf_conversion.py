"""A converted GGUF file says what llama.cpp says of the file, or the file is refused by what is not understood."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_cpp_cases import CASES, PROMPT, TEXTS, TOKENIZERS, write_case, write_tokenizer
from prompt_scores import prompt_logprobs, worker_settings
from small_gguf import EXPERTS, HIDDEN, INNER, convert_in_this_process, write_gguf
from tokenizers import Tokenizer

from pagewire_common.start_error import StartError
from worker_service.loading.gguf.conversion import convert_gguf
from worker_service.loading.gguf.keys import LEFT_OUT

gguf = pytest.importorskip("gguf")

ANSWERS = json.loads(Path(__file__).with_name("llama_cpp_answers.json").read_text())


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file with these options and converts it."""
    convert_in_this_process(monkeypatch)
    count = 0

    def run(write: Callable[[Path], None]) -> Path:
        nonlocal count
        count += 1
        file, folder = tmp_path / "model.gguf", tmp_path / f"converted {count}"
        folder.mkdir()
        write(file)
        convert_gguf(file, folder)
        return folder

    return run


Convert = Callable[[Callable[[Path], None]], Path]


def written(**options: Any) -> Callable[[Path], None]:
    return lambda file: write_gguf(file, **options)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_llama_cpp(name: str, convert: Convert) -> None:
    """In float32. llama.cpp looks Gemma's activation up in a table of float16, which makes a difference of 0.004."""
    folder = convert(lambda file: write_case(name, file))
    found = prompt_logprobs(worker_settings(folder, dtype="float32"))[: len(PROMPT) - 1]
    torch.testing.assert_close(found, torch.tensor(ANSWERS["logprobs"][name]), atol=0.01, rtol=0)


def test_every_case_says_another_thing() -> None:
    """But those that shall make no difference."""
    alike = ("llama without a key_length", "a factor of no scaling", "linear scaling by its old name")
    alike += ("a factor of 0 beside its old name", "gemma3 with a cap of 0")
    answers = [
        tuple(found) for name, found in ANSWERS["logprobs"].items() if name not in (*alike, "a factor without a type")
    ]
    assert len({*answers}) == len(answers)
    for one, another in pairwise(answers):
        assert max(abs(a - b) for a, b in zip(one, another, strict=True)) > 0.05


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_ids_are_those_of_llama_cpp(name: str, convert: Convert) -> None:
    folder = convert(lambda file: write_tokenizer(name, file))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, (plain, parsed) in zip(TEXTS, ANSWERS["tokens"][name], strict=True):
        tokenizer.encode_special_tokens = True
        assert tokenizer.encode(text).ids == plain, text
        tokenizer.encode_special_tokens = False
        assert tokenizer.encode(text).ids == parsed, text
        # The text behind an added token, such as <tool> or two spaces, is decoded with one space more.
        if "<" not in text and "  " not in text:
            assert tokenizer.decode(plain) == text


def test_older_files_with_a_tensor_for_each_expert_mean_the_same(convert: Convert, tmp_path: Path) -> None:
    stacked = convert(lambda file: write_case("mixtral", file))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    apart = {
        name.replace("_exps.weight", f".{number}.weight"): np.array(tensor.data[number])  # the file is written anew
        for name, tensor in tensors.items()
        for number in range(EXPERTS)
        if "_exps" in name
    }
    left_out = {name.removesuffix(".weight"): None for name in tensors if "_exps" in name}
    older = convert(written(**CASES["mixtral"] | {"change": left_out, "more": apart}))
    for name in ("config.json", "model.safetensors"):
        assert (older / name).read_bytes() == (stacked / name).read_bytes()


def own_keys() -> dict[str, Any]:
    """Every key that the library knows, for a Llama, with a value that a Llama has not."""
    groups = gguf.constants.Keys
    names = [
        value.format(arch="llama", id=0, name="x", dense="x")
        for group in (groups.LLM, groups.Attention, groups.Attention.Indexer, groups.Rope, groups.SSM, groups.Tokenizer)
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith(("{arch}", "tokenizer."))
    ]
    return dict.fromkeys(names, 7) | {"llama.rope.scaling.type": "other", "tokenizer.chat_template": "{{ 7 }}"}


def test_every_key_of_the_format_changes_the_result_or_is_refused_by_its_name(convert: Convert, tmp_path: Path) -> None:
    """Of whatever type: a key that a reader takes and forgets would show here. Those of LEFT_OUT may be left out."""
    files = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    base = convert(written())
    original = [(base / name).read_bytes() for name in files]
    beside = {  # what these mean depends on others, or nothing is left for them to mean
        "tokenizer.ggml.scores": "of the model llama",
        "llama.rope.scaling.original_context_length": "of yarn and longrope",
        "llama.expert_count": "refused for want of expert_used_count",
    }
    forgotten: list[str] = []
    for key, value in own_keys().items():
        if any(re.fullmatch(pattern, key) for pattern in LEFT_OUT) or key in beside:
            continue
        try:
            folder = convert(written(keys={key: value}))
        except StartError as error:
            unnamed = key.removeprefix("llama.") not in str(error) and "sizes ask for" not in str(error)
        else:
            unnamed = [(folder / name).read_bytes() for name in files] == original
            unnamed &= not (folder / "modules.json").exists()
        if unnamed:
            forgotten.append(key)
    assert forgotten == []


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q.scale", "blk.1.attn_qkv.bias", "rope_factors_long.weight", "output_norm.bias", "cls.output.weight"],
)
def test_a_tensor_that_nothing_is_made_of_is_refused_by_its_name(name: str, convert: Convert) -> None:
    with pytest.raises(StartError, match=f"{name}"):
        convert(written(more={name: np.ones(4)}))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "mamba"}, "architecture is 'mamba'; supported are gemma, gemma2, gemma3, llama, phi3, qwen2"),
        ({"keys": {"general.type": "adapter"}}, "its general.type is 'adapter', not a model"),
        ({"keys": {"llama.attention.head_count": [4, 2]}}, "head_count differs from layer to layer"),
        ({"keys": {"llama.attention.head_count": "4"}}, "llama.attention.head_count is '4'; it must be a whole number"),
        ({"keys": {"llama.context_length": None}}, "it has no llama.context_length"),
        ({"keys": {"llama.rope.freq_base": float("nan")}}, "rope.freq_base is nan; it must be a number"),
        ({"keys": {"llama.rope.dimension_count": 4}}, "rope.dimension_count is 4, and its heads have 8 numbers"),
        ({"keys": {"llama.attention.value_length": 4}}, "value_length differs from its attention.key_length, 8"),
        ({"keys": {"llama.attention.causal": False}}, "llama.attention.causal is False; supported is True"),
        ({"keys": {"llama.attention.sliding_window": 4}}, "llama.attention.sliding_window is 4; supported is 0"),
        ({"keys": {"llama.logit_scale": 0.5, "llama.key": 1}}, "its llama.key, llama.logit_scale is not known for "),
        ({"keys": {"llama.pooling_type": 4}}, "pooling_type is 4; supported are 0"),
        ({"keys": {"general.sampling.mirostat": 2}}, "general.sampling.mirostat is 2; supported is 0"),
        ({"keys": {"llama.rope.scaling.yarn_ext_factor": 0.5}}, "yarn_ext_factor is 0.5, which is not supported"),
        ({"keys": {"llama.rope.scaling.yarn_beta_fast": 16.0}}, "yarn_beta_fast is 16.0; supported is 32"),
        ({"more": {"rope_freqs.weight": [1, 2, 4]}}, "rope_freqs.weight must be 4 numbers above 0"),
        ({"more": {"rope_freqs.weight": [1, 2, 4, 0]}}, "rope_freqs.weight must be 4 numbers above 0"),
        ({"keys": {"tokenizer.ggml.model": "bert"}}, "tokenizer.ggml.model is 'bert'; supported are gpt2, llama"),
        ({"keys": {"tokenizer.ggml.pre": "new"}}, "tokenizer.ggml.pre is 'new'; supported are .*qwen2"),
        ({"keys": {"tokenizer.ggml.tokens": ["a", "a"] * 130}}, "its tokenizer has a token twice: 'a'"),
        ({"keys": {"tokenizer.ggml.tokens": ["a"]}}, "its tokenizer has 1 tokens, and its embeddings 260"),
        ({"keys": {"tokenizer.ggml.token_type": [1]}}, "token_type has 1 entries for 260 tokens"),
        ({"keys": {"tokenizer.ggml.merges": ["ab"]}}, "merges has 'ab', which is no pair"),
        ({"keys": {"tokenizer.ggml.merges": ["a b"]}}, "its tokenizer is not sound"),
        ({"keys": {"tokenizer.ggml.eot_token_id": 260}}, "eot_token_id is 260, and it has 260 tokens"),
        ({"keys": {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}}, "but names none"),
        ({"change": {"token_embd": None}}, "it has no tensor token_embd.weight"),
        ({"keys": {"llama.feed_forward_length": None}}, "it has no feed_forward_length"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(options: dict[str, Any], reason: str, convert: Convert) -> None:
    with pytest.raises(StartError, match=f"model.gguf cannot be converted from GGUF: .*{reason}") as refusal:
        convert(written(**options))
    assert len(str(refusal.value).splitlines()) == 1


def test_all_tokens_that_end_an_answer_are_in_both_configs(convert: Convert) -> None:
    tokens = [chr(0x200 + number) for number in range(254)]
    tokens += ["<|eot_id|>", "</s>", "<|file_sep|>", "[PAD]", "x", "<|end|>"]
    keys = {
        "tokens": tokens,
        "token_type": [1] * 254 + [3, 1, 3, 3, 1, 3],  # </s> as a word of the vocabulary, such as HTML's
        "merges": [],
        "eos_token_id": 7,
        "eot_token_id": 8,
        "eom_token_id": 9,
        "fim_pad_token_id": 10,
        "padding_token_id": 2**32 - 1,
    }
    folder = convert(written(keys={f"tokenizer.ggml.{name}": value for name, value in keys.items()}))
    for name in ("config.json", "generation_config.json"):
        config = read_json(folder, name)
        assert config["eos_token_id"] == [7, 8, 9, 254, 259, 10, 256]
        assert (config["bos_token_id"], config["pad_token_id"]) == (259, None)
    special = {token["id"] for token in read_json(folder, "tokenizer.json")["added_tokens"] if token["special"]}
    assert special == {7, 8, 9, 10, 254, 256, 257, 259}


def test_what_surrounds_texts_is_as_the_keys_say(convert: Convert) -> None:
    for first, last in ((None, None), (True, False), (False, True), (True, True)):
        added = {"tokenizer.ggml.add_bos_token": first, "tokenizer.ggml.add_eos_token": last}
        folder = convert(written(keys=added | {"tokenizer.ggml.bos_token_id": 5}))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.encode("").ids == [5] * bool(first) + [259] * bool(last)
        assert len(tokenizer.encode("", "").ids) == 2 * (bool(first) + bool(last))


def test_templates_sampling_and_pooling_are_kept(convert: Convert) -> None:
    sampling = {"temp": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.5, "mirostat": 0}
    keys = {
        "tokenizer.chat_template": "{{ 1 }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ 2 }}",
        "llama.pooling_type": 1,
        **{f"general.sampling.{key}": value for key, value in sampling.items()},
    }
    folder = convert(written(keys=keys))
    assert read_json(folder, "tokenizer_config.json")["chat_template"] == [
        {"name": "default", "template": "{{ 1 }}"},
        {"name": "tool_use", "template": "{{ 2 }}"},
    ]
    expected = {"temperature": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5}
    assert read_json(folder, "generation_config.json").items() >= ({"do_sample": True} | expected).items()
    assert read_json(folder / "1_Pooling", "config.json") == {"pooling_mode": "mean"}


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_attention_by_their_width(architecture: str, layers: int, convert: Convert) -> None:
    folder = convert(written(architecture=architecture, layers=layers, head=16))
    assert read_json(folder, "config.json")["query_pre_attn_scalar"] == HIDDEN // 4
    folder = convert(written(architecture=architecture, layers=2, head=16))
    assert read_json(folder, "config.json")["query_pre_attn_scalar"] == 16


def test_a_window_of_phi3_is_obeyed(convert: Convert) -> None:
    """Which llama.cpp leaves out, with a warning."""
    for window in (5, 0):
        folder = convert(written(architecture="phi3", keys={"phi3.attention.sliding_window": window}))
        assert read_json(folder, "config.json")["sliding_window"] == (window or None)


def test_a_layer_without_experts_among_others_is_refused(convert: Convert) -> None:
    change = {f"blk.1.ffn_{name}_exps": None for name in ("gate", "up", "down")} | {"blk.1.ffn_gate": (INNER, HIDDEN)}
    with pytest.raises(StartError, match=r"it has no tensor blk\.1\.ffn_gate_exps\.weight"):
        convert(written(**CASES["mixtral"] | {"change": change}))
