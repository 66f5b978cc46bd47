"""Settings have the names that vLLM's users know; the names of the release before are valid, and say so."""

import json
from pathlib import Path

import pytest
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import scheduler

from pagewire_client import Client
from pagewire_client.local import LocalServer, ServiceProcess
from pagewire_common.settings import load_settings
from scheduler_service.settings import SchedulerSettings
from scheduler_service.simulate import parse_arguments


def load(*arguments: str) -> SchedulerSettings:
    return load_settings(SchedulerSettings, "scheduler_service", arguments)


def test_old_flags_and_variables_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_POLICY", "priority")
    monkeypatch.setenv("PAGEWIRE_LORA", "a=/a,b=/b")
    monkeypatch.setenv("PAGEWIRE_OVERTAKES", "9")
    settings = load("--overtakes=5", "--max-prefill-chunk", "7")
    assert (settings.scheduling_policy, settings.lora_modules) == ("priority", ["a=/a", "b=/b"])
    assert (settings.priority_aging, settings.long_prefill_token_threshold) == (5, 7)
    assert load("--scheduling-policy", "fair").scheduling_policy == "fair"  # a flag wins over the environment


def test_the_quarter_of_a_step_that_was_0_is_what_no_threshold_is() -> None:
    assert load("--max-prefill-chunk", "0").long_prefill_token_threshold is None
    assert load("--long-prefill-token-threshold", "0").long_prefill_token_threshold == 0


@pytest.mark.parametrize("order", [1, -1])
def test_a_flag_under_both_names_is_refused(order: int) -> None:
    flags = [("--policy", "fcfs"), ("--scheduling-policy", "fcfs")][::order]
    sentence = "scheduler_service: --policy is the old name of --scheduling-policy; give the new one alone"
    with pytest.raises(SystemExit, match=sentence):
        load(*(word for flag in flags for word in flag))


def test_a_variable_under_both_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_OVERTAKES", "5")
    monkeypatch.setenv("PAGEWIRE_PRIORITY_AGING", "5")
    with pytest.raises(SystemExit, match="PAGEWIRE_OVERTAKES is the old name of PAGEWIRE_PRIORITY_AGING"):
        load()
    monkeypatch.setenv("PAGEWIRE_OVERTAKES", "")
    assert load().priority_aging == 5


def test_a_bad_value_of_an_old_flag_names_the_new_one() -> None:
    with pytest.raises(SystemExit, match="scheduler_service: --priority-aging: Input should be greater than or equal"):
        load("--overtakes", "0")
    with pytest.raises(SystemExit, match="scheduler_service: --overtakes: a value is expected behind it"):
        load("--overtakes")


def test_each_old_name_writes_one_line_to_the_log(
    tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEWIRE_OVERTAKES", "8")
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=["--num-device-blocks", "64", "--block-size", "8", "--threads", "1", "--speculate", "ngram"],
        scheduler_arguments=["--policy", "priority"],
    ):
        pass
    lines = [line for line in capfd.readouterr().err.splitlines() if "the old name goes" in line]
    said = [json.loads(line.partition(": ")[2])["event"].partition(";")[0] for line in lines]
    assert sorted(said) == [
        "--num-device-blocks is now --num-gpu-blocks-override",
        "--policy is now --scheduling-policy",
        "--speculate is now --speculative-config",
        "PAGEWIRE_OVERTAKES is now PAGEWIRE_PRIORITY_AGING",
    ]


def test_the_simulator_knows_the_old_names_too(capsys: pytest.CaptureFixture[str]) -> None:
    old = ["--policy", "fcfs", "--policy=fair", "--max-prefill-chunk", "7"]
    found = parse_arguments(["--trace", "a.csv", *old])
    assert (found.scheduling_policy, found.long_prefill_token_threshold) == (["fcfs", "fair"], 7)
    assert capsys.readouterr().err.splitlines() == [
        "--policy is now --scheduling-policy; the old name goes with the next release",
        "--max-prefill-chunk is now --long-prefill-token-threshold; the old name goes with the next release",
    ]
    with pytest.raises(SystemExit):
        parse_arguments(["--trace", "a.csv", "--scheduling-policy", "fair", *old])
    assert "--policy is the old name of --scheduling-policy" in capsys.readouterr().err


# ---- host and port


def test_an_address_may_be_given_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--host", "0.0.0.0").listen == "0.0.0.0:50051"
    assert load("--port", "0").listen == "127.0.0.1:0"
    assert load("--host", "::1", "--port", "7").listen == "[::1]:7"
    monkeypatch.setenv("PAGEWIRE_LISTEN", "0.0.0.0:50051")  # as in images
    assert load("--port", "8000").listen == "0.0.0.0:8000"
    monkeypatch.setenv("PAGEWIRE_PORT", "8001")
    assert load().listen == "0.0.0.0:8001"
    assert load("--listen", "localhost:1").listen == "localhost:1"


@pytest.mark.parametrize("part", [("--host", "::1"), ("--port=7",)])
def test_a_part_beside_the_whole_address_is_refused(part: tuple[str, ...]) -> None:
    flag = part[0].partition("=")[0]
    with pytest.raises(SystemExit, match=f"scheduler_service: {flag}: it is a part of --listen; give one of them"):
        load("--listen", "localhost:1", *part)


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_cannot_be_is_refused(port: str) -> None:
    with pytest.raises(SystemExit, match="scheduler_service: --port: Input should be"):
        load(f"--port={port}")


def test_the_variable_that_kubernetes_makes_of_a_service_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_PORT", "tcp://10.0.0.1:50051")
    assert load().listen == "127.0.0.1:50051"


def test_a_service_listens_where_its_parts_say() -> None:
    process = ServiceProcess(
        "scheduler_service", ["--host", "127.0.0.2", "--port", "0", "--admin-listen", "127.0.0.1:0"]
    )
    try:
        assert str(process.wait_for("listening", 60)["address"]).startswith("127.0.0.2:")
    finally:
        process.stop()


# ---- adapters


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["a=/a", "b=/b"], ["a=/a", "b=/b"]),
        (["a=/a,b=/b"], ["a=/a", "b=/b"]),
        (['{"name": "a", "path": "/with, a comma"}', "b=/b"], ["a=/with, a comma", "b=/b"]),
        (['[{"name": "a", "path": "/a"}, {"name": "b", "path": "/b=c"}]'], ["a=/a", "b=/b=c"]),
    ],
)
def test_adapters_are_named_as_vllm_has_them(words: list[str], found: list[str]) -> None:
    assert load("--lora-modules", *words, "--no-prefix-caching").lora_modules == found


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ('{"name": "a", "path": "/a", "base_model_name": "b"}', "the key 'base_model_name' is not known here"),
        ('{"name": "a"}', 'an adapter in JSON has a "name" without = and a "path"'),
        ('{"name": "a=b", "path": "/a"}', 'an adapter in JSON has a "name" without = and a "path"'),
        ('{"name": "a", "path": "/a", "path": "/b"}', "'path' is there twice"),
        ("[1]", "1 is no adapter; one in JSON is an object"),
        ('{"name": ', "it is neither NAME=FOLDER nor JSON"),
    ],
)
def test_what_an_adapter_in_json_says_is_obeyed_or_refused(
    word: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_LORA_MODULES", word)
    with pytest.raises(SystemExit, match=f"scheduler_service: --lora-modules: {sentence}"):
        load()


# ---- the model's name


async def test_a_model_is_served_under_the_name_that_it_is_given(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, scheduler(address, model=None, served_model_name="mine") as one:
        async with Client(one.target) as client:
            assert (await client.get_model()).name == "mine"
        assert one.engine.fleet.agreement.model_name == "mine"


def test_a_second_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--served-model-name", "mine", "also-mine")
    assert "unrecognized arguments: also-mine" in capsys.readouterr().err
