"""The model's own defaults are honoured, and what makes no sense among them is left out and told of."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pagewire.v1.engine_service_pb2 import ModelLimits
from pagewire_common.eos_tokens import eos_token_ids
from scheduler_service.frontend.generation_defaults import GenerationDefaults
from scheduler_service.frontend.model import ServedModel

SOUND = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 7,
}


def test_sound_values_are_taken() -> None:
    with capture_logs() as logs:
        assert GenerationDefaults.from_config(SOUND) == GenerationDefaults(0.6, 40, 0.9, 0.05, 1.1, 7)
        assert GenerationDefaults.from_config({"temperature": 0.6, "top_p": None}) == GenerationDefaults()
        assert GenerationDefaults.from_config({"do_sample": True}) == GenerationDefaults(temperature=1.0)
        assert GenerationDefaults.from_config({"do_sample": True, "temperature": 0}) == GenerationDefaults()
    assert not logs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -1),
        ("temperature", 1e9),
        ("temperature", "0.6"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 40.5),
        ("top_k", 2**80),
        ("top_k", [40]),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", float("inf")),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", {}),
        ("max_new_tokens", 0),
        ("max_new_tokens", "many"),
        ("max_new_tokens", 1e3),
        ("max_new_tokens", False),
    ],
)
def test_a_value_that_makes_no_sense_is_left_out_with_a_warning(name: str, value: Any) -> None:
    without = {key: other for key, other in SOUND.items() if key != name}
    with capture_logs() as logs:
        assert GenerationDefaults.from_config(SOUND | {name: value}) == GenerationDefaults.from_config(without)
    (warning,) = logs
    assert (warning["log_level"], warning["name"], warning["value"]) == ("warning", name, repr(value))


@pytest.mark.parametrize("value", ["false", 1, [True]])
def test_a_switch_that_is_none_samples_nothing(value: Any) -> None:
    with capture_logs() as logs:
        assert GenerationDefaults.from_config(SOUND | {"do_sample": value}).temperature == 0
    assert [warning["name"] for warning in logs] == ["do_sample"]


@pytest.mark.parametrize(
    ("generation", "config", "expected", "num_warnings"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 3}, (2,), 0),
        ({}, {"eos_token_id": [3, 4]}, (3, 4), 0),
        ({}, {}, (), 0),
        ({"eos_token_id": [2, 99, -1, "5", 2.0, True, None, [3]]}, {}, (2,), 1),
        ({"eos_token_id": "</s>"}, {"eos_token_id": 3}, (3,), 1),
        ({"eos_token_id": None}, {"eos_token_id": 3}, (3,), 0),
    ],
)
def test_only_token_ids_end_an_output(
    generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...], num_warnings: int
) -> None:
    with capture_logs() as logs:
        assert eos_token_ids(config, generation, None, vocabulary_size=99) == expected
    assert len(logs) == num_warnings


@pytest.mark.parametrize(
    ("named", "of_tokenizer", "expected"),
    [(2, 4, (2, 4)), (None, 4, (4,)), ([3, 4], 4, (3, 4)), (2, None, (2,)), (2, 99, (2,)), ("</s>", 0, (0,))],
)
def test_the_tokenizers_end_ends_an_output_too(
    named: object, of_tokenizer: int | None, expected: tuple[int, ...]
) -> None:
    for files in (({}, {"eos_token_id": named}), ({"eos_token_id": named}, {})):
        with capture_logs():
            assert eos_token_ids(*files, of_tokenizer, vocabulary_size=99) == expected


def test_a_served_model_ends_where_its_tokenizer_says(byte_tokenizer_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(byte_tokenizer_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    limits = ModelLimits(block_size=4, context_length=9, pool_tokens=32, vocabulary_size=259, max_num_seqs=1)
    assert ServedModel.load(limits, tmp_path).eos_token_ids == (0, 2)


def test_a_model_with_a_spoiled_generation_config_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": NaN, "top_p": 0.5}')
    limits = ModelLimits(block_size=4, context_length=9, pool_tokens=32, vocabulary_size=5, max_num_seqs=1)
    with capture_logs() as logs:
        model = ServedModel.load(limits, tmp_path)
    assert model.defaults == GenerationDefaults(temperature=1.0, top_p=0.5)
    assert model.eos_token_ids == (2,)
    assert [warning["name"] for warning in logs] == ["temperature"]
