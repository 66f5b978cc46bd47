"""What generation_config.json says is obeyed as transformers obeys it, refused by name, or known to do nothing."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_helpers import serving
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tiny_model import write_tiny_llama
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig as TheirConfig

from pagewire.v1.engine_service_pb2 import ModelLimits
from pagewire_client import Client
from pagewire_client.llm import collect
from pagewire_common.model_files.eos_tokens import eos_token_ids
from pagewire_common.model_files.generation_config import GenerationConfig, GenerationDefaults
from pagewire_common.model_files.generation_keys import MAX_LISTED, kinds
from pagewire_common.start_error import StartError
from scheduler_service.engine.worker_link.client import TOKENIZER_FILES
from scheduler_service.frontend.http.openai.chat_fields import ChatFields, chat_params
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.speech.speech_tokens import SpeechTokens
from worker_service.loading.tokenizer_files import NAMES

VOCABULARY = 60_000
SOUND = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 7,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {"_from_model_config": True, "do_sample": True, "max_length": 4096, "pad_token_id": 0,
                "temperature": 0.6, "top_p": 0.9, "bos_token_id": 1, "eos_token_id": 2},
    "Qwen2.5": {"repetition_penalty": 1.05, "top_k": 20, "top_p": 0.8, "eos_token_id": [5, 6], "do_sample": True},
    "ERNIE 4.5": {"eos_token_id": 2, "top_p": 0.8, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "Gemma 3": {"cache_implementation": "hybrid", "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106]},
    "T5": {"_from_model_config": True, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
           "transformers_version": "4.27.0.dev0"},
    "bart-large-cnn": {"_from_model_config": True, "bos_token_id": 0, "decoder_start_token_id": 2,
                       "early_stopping": True, "eos_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2,
                       "length_penalty": 2.0, "max_length": 142, "min_length": 56, "no_repeat_ngram_size": 3,
                       "num_beams": 4, "pad_token_id": 1},
    "opus-mt": {"bad_words_ids": [[58100]], "bos_token_id": 0, "decoder_start_token_id": 58100, "eos_token_id": 0,
                "forced_eos_token_id": 0, "max_length": 512, "num_beams": 4, "pad_token_id": 58100,
                "renormalize_logits": True},
    "whisper-tiny": {"alignment_heads": [[2, 2]], "begin_suppress_tokens": [220, 50257], "bos_token_id": 50257,
                     "decoder_start_token_id": 50258, "eos_token_id": 50257, "is_multilingual": True,
                     "forced_decoder_ids": [[1, None], [2, 50359]], "lang_to_id": {"<|en|>": 50259},
                     "max_initial_timestamp_index": 1, "max_length": 448, "no_timestamps_token_id": 50363,
                     "pad_token_id": 50257, "prev_sot_token_id": 50361, "return_timestamps": False,
                     "suppress_tokens": [1, 2], "task_to_id": {"transcribe": 50359, "translate": 50358}},
}  # fmt: skip
"""Files of popular models as their authors have published them, with fewer entries in long lists."""


def read(generation: Mapping[str, Any] | None, config: Mapping[str, Any] = {}, size: int = VOCABULARY) -> Any:
    return GenerationConfig.read(config, generation, size)


def defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    return GenerationDefaults.of(read(generation))


def test_sound_values_are_taken() -> None:
    assert defaults(SOUND) == GenerationDefaults(
        **{name: value for name, value in SOUND.items() if name != "do_sample"}, http_temperature=0.6
    )
    assert defaults({"temperature": 0.6, "top_p": None}) == GenerationDefaults(http_temperature=0.6)
    assert defaults({"do_sample": True}) == GenerationDefaults(temperature=1.0)
    assert defaults({"do_sample": True, "temperature": 0}) == GenerationDefaults(http_temperature=0.0)
    assert defaults({"do_sample": False}) == GenerationDefaults(http_temperature=0.0)


@pytest.mark.parametrize("generation", PUBLISHED.values(), ids=PUBLISHED)
def test_published_files_are_read(generation: dict[str, Any]) -> None:
    GenerationDefaults.of(read(generation))


def test_what_a_request_chooses_itself_is_told_and_nothing_else() -> None:
    chosen = {name: read(generation).chosen_by_requests for name, generation in PUBLISHED.items()}
    assert chosen.pop("opus-mt") == {"forced_eos_token_id": 0, "num_beams": 4}
    assert chosen.pop("bart-large-cnn") == {
        "early_stopping": True,
        "forced_eos_token_id": 2,
        "length_penalty": 2.0,
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
    }
    assert not any(chosen.values())
    assert not read({"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}).chosen_by_requests


def test_every_field_of_transformers_is_known_and_its_own_defaults_are_read() -> None:
    fields = TheirConfig().to_dict()
    assert not fields.keys() - kinds({}).keys()
    GenerationDefaults.of(read(TheirConfig._get_default_generation_params()))  # type: ignore[no-untyped-call]


WRONG = [
    ("temperature", float("nan")),
    ("temperature", -1),
    ("temperature", 1e9),
    ("temperature", "0.6"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 40.5),
    ("top_k", 2**80),
    ("top_k", 10**400),
    ("top_k", [40]),
    ("top_p", 0),
    ("top_p", float("inf")),
    ("min_p", -0.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", {"a": 1}),
    ("max_new_tokens", 0),
    ("max_new_tokens", 1e3),
    ("max_new_tokens", False),
    ("do_sample", "false"),
    ("do_sample", 1),
    ("max_length", 0),
    ("max_length", float("inf")),
    ("min_length", -1),
    ("min_new_tokens", "3"),
    ("num_beams", 0),
    ("num_beams", "4"),
    ("length_penalty", float("nan")),
    ("early_stopping", "always"),
    ("no_repeat_ngram_size", -3),
    ("forced_eos_token_id", VOCABULARY),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [2, True]),
    ("eos_token_id", VOCABULARY),
    ("bos_token_id", "<s>"),
    ("decoder_start_token_id", [0]),
    ("decoder_start_token_id", -1),
    ("forced_bos_token_id", 1.0),
    ("suppress_tokens", 3),
    ("suppress_tokens", [-1]),
    ("suppress_tokens", [1] * (MAX_LISTED + 1)),
    ("begin_suppress_tokens", ["a"]),
    ("bad_words_ids", [3]),
    ("bad_words_ids", [[]]),
    ("bad_words_ids", [[VOCABULARY]]),
    ("sequence_bias", [[[1, 2], 0.5]]),
    ("sequence_bias", [[[1], float("nan")]]),
    ("sequence_bias", [[[1], 101]]),
    ("sequence_bias", [[[1], 1], [[1], 2]]),
    ("sequence_bias", {"1": 2}),
    ("stop_strings", [""]),
    ("stop_strings", ["x" * 257]),
    ("stop_strings", 3),
    ("typical_p", 0.9),
    ("guidance_scale", 1.5),
    ("penalty_alpha", 0.6),
    ("encoder_repetition_penalty", 1.2),
    ("watermarking_config", {"greenlist_ratio": 0.25}),
    ("exponential_decay_length_penalty", [15, 1.6]),
    ("token_healing", True),
    ("force_words_ids", [[1]]),
    ("max_time", 2.0),
    ("dola_layers", "high"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_that_cannot_be_obeyed_is_refused_by_its_key(name: str, value: Any) -> None:
    with pytest.raises(StartError, match=rf"^generation_config.json: {name} is .*; it must be ") as error:
        read(SOUND | {name: value})
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("generation", "sentence"),
    [
        ({"top_pp": 0.5, "a\nb": 1}, r"^generation_config.json says 'top_pp' = 0.5, 'a\\nb' = 1, which is not known"),
        ({f"key{n}": n for n in range(20)}, "and 12 more, which is not known"),
        ({"lang_to_id": {"<|en|>": 4}}, "says 'lang_to_id' = "),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, above max_new_tokens, which is 8"),
        ({"min_length": 9, "max_length": 8}, "min_length is 9, above max_length, which is 8"),
        ({"forced_bos_token_id": 3, "suppress_tokens": [3]}, "forced_bos_token_id is 3, which suppress_tokens bans"),
        ({"forced_eos_token_id": [3, 4], "suppress_tokens": [4, 3]}, "forced_eos_token_id is .3, 4., which suppress_"),
    ],
)
def test_unknown_keys_and_contradictions_are_refused(generation: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        GenerationDefaults.of(read(generation))


def test_a_file_that_bans_every_token_is_refused() -> None:
    config = {"suppress_tokens": [0, 1], "bad_words_ids": [[2]], "begin_suppress_tokens": [3], "eos_token_id": 4}
    with pytest.raises(StartError, match="bans every token of the vocabulary, of 5 tokens"):
        GenerationDefaults.of(read(config, size=5))
    GenerationDefaults.of(read(config, size=6))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(kinds({"no_timestamps_token_id": 1}))), JSON, max_size=6))
def test_whatever_a_file_says_it_is_read_or_refused(generation: dict[str, Any]) -> None:
    try:
        found = GenerationDefaults.of(read(generation, size=9))
    except StartError:
        return
    assert json.dumps(found.sampling_params(), allow_nan=False)


def test_without_the_file_config_json_is_read_for_its_keys_as_in_transformers() -> None:
    config = {"hidden_size": 4, "num_beams": 4, "max_length": 9, "language": "de", "eos_token_id": 3}
    found = read(None, config)
    assert (found.keys, found.file) == ({"num_beams": 4, "max_length": 9, "eos_token_id": 3}, "config.json")
    assert read({}, config).keys == {}
    with pytest.raises(StartError, match=r"^config.json: max_length is 'long'; it must be a whole number at least 1"):
        read(None, config | {"max_length": "long"})


@pytest.mark.parametrize(
    ("generation", "config", "of_tokenizer", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 3}, None, (2,)),
        ({}, {"eos_token_id": [3, 4, 3]}, None, (3, 4)),
        ({"eos_token_id": None}, {"eos_token_id": 3}, None, (3,)),
        (None, {"eos_token_id": 3}, 4, (3, 4)),
        ({}, {}, None, ()),
        ({}, {}, 4, (4,)),
        ({"eos_token_id": [3, 4]}, {}, 4, (3, 4)),
        ({"eos_token_id": 2}, {}, VOCABULARY, (2,)),
    ],
)
def test_outputs_end_where_the_files_and_the_tokenizer_say(
    generation: dict[str, Any] | None, config: dict[str, Any], of_tokenizer: int | None, expected: tuple[int, ...]
) -> None:
    assert eos_token_ids(config, read(generation, config), of_tokenizer) == expected


def test_an_end_in_config_json_that_is_no_token_is_refused() -> None:
    config = {"eos_token_id": "</s>"}
    with pytest.raises(StartError, match=r"config.json: eos_token_id is '</s>'; it must be a token id of the model's"):
        eos_token_ids(config, read({}, config), None)


LIMITS = ModelLimits(
    block_size=4, context_length=9, pool_tokens=32, vocabulary_size=259, max_num_seqs=1, generates=True
)


def test_a_served_model_ends_where_its_tokenizer_says(byte_tokenizer_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(byte_tokenizer_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert ServedModel.load(LIMITS, tmp_path).eos_token_ids == (0, 2)


def test_stop_strings_of_a_model_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"stop_strings": "END"}')
    with pytest.raises(StartError, match="says stop_strings, and there is no tokenizer to find them with"):
        ServedModel.load(LIMITS, tmp_path)


def spoken(**said: Any) -> SpeechTokens | None:
    whisper = PUBLISHED["whisper-tiny"] | {"lang_to_id": {"<|en|>": 50259, "<|de|>": 50261}}
    return SpeechTokens.read(read(whisper | said), 50258, 50257)


@pytest.mark.parametrize(
    ("said", "language"),
    [
        ({}, ""),
        ({"forced_decoder_ids": None}, ""),
        ({"forced_decoder_ids": [[1, 50261], [2, 50359], [3, 50363]]}, "de"),
        ({"forced_decoder_ids": [[1, 50261]], "language": "english"}, "en"),
        ({"language": "<|de|>"}, "de"),
        ({"language": "de", "task": "transcribe"}, "de"),
    ],
)
def test_a_transcript_is_in_the_language_that_the_file_names(said: dict[str, Any], language: str) -> None:
    tokens = spoken(**said)
    assert tokens is not None
    assert tokens.language == language


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"language": "martian"}, "language is 'martian', which lang_to_id does not have"),
        ({"language": 3}, "language is 3; it must be a text"),
        ({"task": "translate"}, "task is 'translate'; it must be null or 'transcribe'"),
        ({"forced_decoder_ids": [[2, 50358]]}, "forced_decoder_ids has the token 50358, which is none of a language"),
        ({"forced_decoder_ids": [[1, VOCABULARY]]}, "forced_decoder_ids is .*; it must be a list of pairs"),
        ({"lang_to_id": {"<|en|>": "a"}}, "lang_to_id is .*; it must be an object of token ids"),
        ({"task_to_id": [3]}, "task_to_id is .*; it must be an object of token ids"),
        (
            {"no_timestamps_token_id": VOCABULARY - 1},
            "behind it must be the token of 0 s, and the model has",
        ),
        ({"no_timestamps_token_id": True}, "no_timestamps_token_id is True; it must be a token id"),
        ({"max_initial_timestamp_index": -1}, "max_initial_timestamp_index is -1; it must be a whole number"),
        ({"no_speech_threshold": 0.6}, "says 'no_speech_threshold' = 0.6, which is not known"),
    ],
)
def test_what_a_model_that_hears_cannot_be_told_is_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        spoken(**said)


def test_over_http_the_temperature_is_1_unless_the_request_or_the_file_says_another(byte_model: ServedModel) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], float]] = [
        ({}, {}, 1.0),
        ({"temperature": 0.6}, {}, 0.6),
        ({"temperature": 0.6}, {"temperature": 0}, 0.0),
    ]
    for said, asked, expected in cases:
        model = replace(byte_model, defaults=defaults(said))
        fields = ChatFields.model_validate({"messages": []} | asked)
        assert chat_params(fields, model).temperature == pytest.approx(expected)


def test_schedulers_take_every_file_that_workers_send() -> None:
    assert {*NAMES} == TOKENIZER_FILES


async def test_a_served_model_generates_what_transformers_does_with_its_file(
    byte_tokenizer_directory: Path, tmp_path: Path
) -> None:
    """Each key of the file changes the output: it bans what the model says without it, and ends it later."""
    folder = tmp_path / "model"
    write_tiny_llama(folder, byte_tokenizer_directory)
    network: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = [*range(70, 90)]

    def generated(said: dict[str, Any]) -> list[int]:
        config = TheirConfig(**{"pad_token_id": 0, "eos_token_id": 2, "max_length": 48} | said)
        whole: list[int] = network.generate(torch.tensor([prompt]), generation_config=config)[0].tolist()
        return whole[len(prompt) :]

    said: dict[str, Any] = {"repetition_penalty": 1.1}
    outputs = [last := generated(said)]
    for key, make in {
        "suppress_tokens": lambda last: [last[2]],
        "begin_suppress_tokens": lambda last: [last[0]],
        "bad_words_ids": lambda last: [last[1:3], [last[7]]],
        "sequence_bias": lambda last: [[[100], 4.5], [[last[3]], -3.0]],
    }.items():
        said |= {key: make(last)}
        outputs.append(last := generated(said))
    said |= {"eos_token_id": [2, outputs[-1][3]], "min_length": len(prompt) + 9, "max_length": len(prompt) + 20}
    outputs.append(generated(said))
    assert len({*map(tuple, outputs)}) == len(outputs)
    assert 9 <= len(outputs[-1]) <= 20
    (folder / "generation_config.json").write_text(json.dumps(said | {"num_beams": 1, "no_repeat_ngram_size": 2}))
    with capture_logs() as logs:
        async with serving(folder) as (one, _), Client(one.target) as client:
            found = await collect(client, prompt)
    assert found.outputs[0].token_ids == outputs[-1]
    (told,) = [entry for entry in logs if "prefers a decoding method" in entry["event"]]
    assert told["no_repeat_ngram_size"] == 2
