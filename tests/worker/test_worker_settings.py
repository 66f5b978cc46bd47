"""The worker's flags and variables have the names and limits that its users rely on."""

import json
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
        ("--num-gpu-blocks-override", "0"),
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


def config(**keys: object) -> tuple[str, str]:
    return "--speculative-config", json.dumps(keys)


def test_guesses_are_said_in_the_json_of_vllm() -> None:
    assert load().speculation is None
    found = load(
        *config(method="ngram", num_speculative_tokens=5, prompt_lookup_min=3, prompt_lookup_max=4)
    ).speculation
    assert found is not None
    assert (found.method, found.num_speculative_tokens, found.fewest, found.longest) == ("ngram", 5, 3, 4)
    draft = load(*config(method="draft_model", model="default")).speculation
    assert draft is not None
    assert (draft.model, draft.num_speculative_tokens) == ("default", 8)


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [({}, (2, 16)), ({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_min": 20}, (20, 20))],
)
def test_a_bound_of_ngrams_that_is_given_alone_moves_the_other(keys: dict[str, int], bounds: tuple[int, int]) -> None:
    found = load(*config(method="ngram", **keys)).speculation
    assert found is not None
    assert (found.fewest, found.longest) == bounds


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"method": "ngram", "disable_by_batch_size": 4}, "the key 'disable_by_batch_size' is not known here"),
        ({"method": "eagle", "model": "m"}, "method: Input should be 'ngram', 'draft_model', 'eagle3' or 'mtp'"),
        ({"model": "m"}, "method: Field required"),
        ({"method": "draft_model"}, '"model" goes together with the methods "draft_model" and "eagle3"'),
        ({"method": "eagle3"}, '"model" goes together with the methods "draft_model" and "eagle3"'),
        ({"method": "ngram", "model": "m"}, '"model" goes together with the methods "draft_model" and "eagle3"'),
        ({"method": "mtp", "prompt_lookup_min": 2}, '"prompt_lookup_min" and "prompt_lookup_max" are for the method'),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, '"prompt_lookup_min" is 5'),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens: Input should be less than or"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "num_speculative_tokens: Input should be a valid integer"),
    ],
)
def test_what_a_config_of_guesses_says_is_obeyed_or_refused(keys: dict[str, object], sentence: str) -> None:
    with pytest.raises(SystemExit, match=f"worker_service: --speculative-config: {sentence}"):
        load(*config(**keys))


def test_a_key_of_the_config_has_one_value() -> None:
    with pytest.raises(SystemExit, match="--speculative-config: 'method' is there twice, as 'ngram' and as 'mtp'"):
        load("--speculative-config", '{"method": "ngram", "method": "mtp"}')


def test_a_network_guesses_in_one_process() -> None:
    sentence = 'worker_service: --speculative-config: "{}" is for a model that one process holds'
    for keys in ({"method": "mtp"}, {"method": "draft_model", "model": "default"}):
        with pytest.raises(SystemExit, match=sentence.format(keys["method"])):
            load("--tensor-parallel-size", "2", *config(**keys))
    assert load("--tensor-parallel-size", "2", *config(method="ngram")).speculation is not None


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("--speculate none --num-speculative-tokens 3", None),
        ("--speculate ngram --num-speculative-tokens 3", {"method": "ngram", "num_speculative_tokens": 3}),
        ("--speculate=draft --draft-model m", {"method": "draft_model", "model": "m"}),
        ("--speculate eagle --draft-model m", {"method": "eagle3", "model": "m"}),
        ("--speculate mtp", {"method": "mtp"}),
    ],
)
def test_the_flags_that_guesses_had_are_one_config(arguments: str, found: dict[str, object] | None) -> None:
    settings = load(*arguments.split())
    assert (settings.speculation.model_dump(exclude_unset=True) if settings.speculation else None) == found


def test_parts_of_a_config_may_be_old_flags_and_old_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_SPECULATE", "draft")
    monkeypatch.setenv("PAGEWIRE_DRAFT_MODEL", "of the environment")
    found = load("--draft-model", "of a flag").speculation
    assert found is not None
    assert (found.method, found.model) == ("draft_model", "of a flag")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--speculate", "lookahead"), "--speculate: it may be none, ngram, draft, eagle, mtp"),
        (("--draft-model", "default"), "--draft-model: it goes together with --speculate draft and eagle"),
        (("--speculate", "ngram", "--num-speculative-tokens", "few"), "--num-speculative-tokens: 'few' is no whole"),
        (("--speculate", "ngram", *config(method="ngram")), "--speculate is the old name of --speculative-config"),
    ],
)
def test_old_flags_of_guesses_that_say_nothing_clear_are_refused(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SystemExit, match=f"worker_service: {sentence}"):
        load(*arguments)
