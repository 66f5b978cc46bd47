"""Published files of Gemma 3n, with networks for images and sounds, compute text as transformers' text network."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gemma3n_files import TEXT, WHOLE, write_whole
from prompt_scores import worker_settings
from stepped_worker import PROMPT, Oracle, SteppedWorker, generate_with_everything, load_runner
from structlog.testing import capture_logs

from pagewire_common.sounds.families import read_sound_layouts
from worker_service.execution.startup.network import Network
from worker_service.models.config.text_part import text_part
from worker_service.models.registry import read_config
from worker_service.parallel.ranks import ALONE


class Folders(NamedTuple):
    whole: Path
    text: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    path = tmp_path_factory.mktemp("gemma3n")
    return Folders(write_whole(path / "whole", path / "text"), path / "text")


def test_text_is_that_of_the_text_network(folders: Folders) -> None:
    oracle, runner = Oracle(folders.text), load_runner(folders.whole)
    found = SteppedWorker(runner).prompt_logprobs([5, 1, 17, 13])
    torch.testing.assert_close(found, oracle.logprobs(PROMPT)[:-1], atol=1e-4, rtol=1e-4)
    expected = oracle.greedy(PROMPT, 14), oracle.greedy(PROMPT[:20], 4)
    assert generate_with_everything(SteppedWorker(runner), 14) == expected


def test_images_and_sounds_are_refused_by_a_sentence(folders: Folders) -> None:
    with capture_logs() as logs:
        network = Network.open(str(folders.whole), worker_settings(folders.whole), torch.device("cpu"), ALONE)
    network.check()
    assert network.images is None
    (reason,) = (log["reason"] for log in logs if log["event"] == "prompts cannot contain images or sounds")
    assert "'gemma3n' are not read: its network for images needs the library timm" in reason
    with pytest.raises(ValueError, match="sounds of models of type 'gemma3n' are not read"):
        read_sound_layouts(folders.whole)


def test_a_file_without_a_text_part_has_the_defaults_of_transformers() -> None:
    whole = {"model_type": "gemma3n", "vision_config": {}, "audio_config": {}}
    assert text_part(whole) == {"model_type": "gemma3n_text", "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda whole: whole | {"audio_conf": 1}, "it says audio_conf = 1, which is not supported"),
        (lambda whole: _in_text(whole) | {"tie_word_embeddings": False}, "tie_word_embeddings is False for the netw"),
        (lambda whole: _in_text(whole, query_pre_attn_scalar=16), "query_pre_attn_scalar = 16, which is not supported"),
        (lambda whole: _in_text(whole, odd=1), "odd = 1, which is not supported"),
        (lambda whole: _in_text(whole, model_type="gemma3_text"), "text_config describes a model gemma3_text"),
    ],
)
def test_other_keys_are_refused_by_name(changed: Callable[[dict[str, Any]], dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_config(changed(json.loads(json.dumps(WHOLE))))


def _in_text(whole: dict[str, Any], **changes: object) -> dict[str, Any]:
    return whole | {"text_config": TEXT | {"tie_word_embeddings": True} | changes}
