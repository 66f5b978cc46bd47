"""The worker's flags and variables have the names and limits that its users rely on."""

from pathlib import Path

import pytest

from pagewire_common.settings import load_settings
from worker_service.settings import WorkerSettings


def load(*arguments: str) -> WorkerSettings:
    return load_settings(WorkerSettings, "worker_service", arguments)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_BLOCK_SIZE", "32")
    monkeypatch.setenv("PAGEWIRE_CACHE", "/models")
    monkeypatch.setenv("PAGEWIRE_MAX_NUM_SEQS", "7")
    settings = load("--max-num-seqs", "9", "--swap-space", "0")
    assert (settings.block_size, settings.cache, settings.max_num_seqs) == (32, Path("/models"), 9)
    assert settings.swap_space == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--block-size", "0"),
        ("--block-size", "257"),
        ("--num-device-blocks", "0"),
        ("--swap-space", "-1"),
        ("--swap-space", "nan"),
        ("--gpu-memory-utilization", "1.1"),
        ("--kv-cache-memory", "0"),
        ("--kv-cache-memory", "inf"),
        ("--load-format", "pickle"),
        ("--dtype", "int8"),
        ("--listen", "nowhere"),
    ],
)
def test_values_out_of_bounds_end_with_a_sentence(arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match=f"worker_service: {arguments[0]}: "):
        load(*arguments)


def test_the_layer_of_a_checkpoint_guesses_in_one_process() -> None:
    with pytest.raises(SystemExit, match="worker_service: --speculate: mtp is for a model that one process holds"):
        load("--speculate", "mtp", "--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--speculate", "draft"), "it goes together with --speculate draft and eagle"),
        (("--speculate", "eagle"), "it goes together with --speculate draft and eagle"),
        (("--draft-model", "default"), "it goes together with --speculate draft and eagle"),
        (("--speculate", "mtp", "--draft-model", "default"), "it goes together with --speculate draft and eagle"),
        (
            ("--speculate", "draft", "--draft-model", "default", "--tensor-parallel-size", "2"),
            "it is for a model that one process holds",
        ),
    ],
)
def test_a_draft_model_is_for_guessing_in_one_process(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SystemExit, match=f"worker_service: --draft-model: {sentence}"):
        load(*arguments)
