"""`pagewire`: one command for every program, which says what this machine has and which server it uses."""

import argparse
import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import until

from kernels import backends
from pagewire_client import Client, LocalServer, channel, local
from pagewire_client.cli import running
from pagewire_client.cli.parser import parse_arguments
from pagewire_client.cli.running import find_server
from pagewire_command import __main__ as command
from pagewire_command import doctor, machine
from pagewire_command.commands import COMMANDS
from pagewire_common.settings import load_settings
from scheduler_service.settings import SchedulerSettings
from worker_service.execution.startup import capacity
from worker_service.settings import WorkerSettings

REAL_GPUS = machine.gpus


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["pagewire", *words])
    command.main()


def test_the_help_lists_every_command_without_torch_or_grpc() -> None:
    script = "import sys, pagewire_command.__main__ as p; p.main(); print({'torch', 'grpc', 'rich'} & {*sys.modules})"
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert listed.endswith("set()\n")
    assert all(f"\n  {name} " in listed for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("serv", "pagewire: there is no command 'serv'; did you mean serve?"),
        ("???", "pagewire: there is no command '???'; pagewire --help lists all commands"),
        ("scheduler --listen x", "pagewire scheduler: --listen: 'x' is not HOST:PORT (got 'x')"),
        ("bench nothing", "pagewire bench: 'nothing' is no benchmark; there are "),
        ("replay /nowhere", "2"),
    ],
)
def test_a_command_has_its_own_name_in_its_errors(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *words.split())
    assert str(end.value.code).startswith(sentence)
    if words.startswith("replay"):
        assert "pagewire replay: /nowhere: No such file" in capsys.readouterr().err


def test_a_program_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "worker_service.__main__", None)
    with pytest.raises(SystemExit, match=r"pagewire worker: .*worker_service.* is not installed here"):
        run(monkeypatch, "worker")


def test_the_model_is_the_first_word_or_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("serve", "chat", "run"):
        assert parse_arguments([name, "m"]).model == parse_arguments([name, "--model", "m"]).model == "m"
        with pytest.raises(SystemExit):
            parse_arguments([name, "m", "--model", "n"])
        assert "--model is n, but MODEL is m; give one of them" in capsys.readouterr().err
    for settings in (SchedulerSettings, WorkerSettings):
        assert load_settings(settings, "p", ["m", "--log-level", "error"]).model == "m"


@pytest.fixture
def found(tiny_server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("PAGEWIRE_TARGET", raising=False)
    monkeypatch.setattr(running, "DEFAULT_TARGET", tiny_server.target)
    return tiny_server.target


def parsed(*words: str) -> argparse.Namespace:
    return parse_arguments([*words], find=find_server)


def test_a_server_at_the_default_port_is_used_and_named(
    found: str, tiny_model_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CLIENT_API_KEY", "a client's")
    for words in (("generate", "hi"), ("chat",), ("run", "tiny-llama"), ("run", str(tiny_model_directory))):
        arguments = parsed(*words)
        assert (arguments.target, arguments.api_key, arguments.retry_for) == (found, "a client's", 60)
        assert capsys.readouterr().err == f"using the server at {found}, which serves 'tiny-llama'\n"


def test_a_server_that_does_not_serve_what_is_asked_for_is_not_used_and_it_is_said_why(
    found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not parsed("run", "gpt").target
    assert capsys.readouterr().err == f"the server at {found} serves 'tiny-llama', not 'gpt'\n"
    transcribing = argparse.Namespace(command="transcribe", model=None)
    assert running._why_not(transcribing, "tiny", ["generate", "embed"]) == "serves 'tiny', which cannot transcribe"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(running, "DEFAULT_TARGET", f"127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(running, "ANSWER_SECONDS", 0.1)
        assert parsed("generate", "hi").retry_for == 0
    assert "does not answer within 0.1 s" in capsys.readouterr().err
    assert not parsed("generate", "hi").target  # nothing listens any more
    assert capsys.readouterr().err == ""


async def test_a_target_that_accepts_and_is_silent_is_said_while_the_client_tries(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.log, "disabled", False)  # libraries that configure logging disable loggers of others
    monkeypatch.setattr(channel, "SILENT_SECONDS", 0.05)
    caplog.set_level(logging.INFO, logger="pagewire_client")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        async with Client(target, retry_for=30) as client:
            asking = asyncio.create_task(client.get_model())
            await until(lambda: f"{target} does not answer yet; trying for 30 s" in caplog.messages)
            assert not asking.done()
            asking.cancel()


@pytest.mark.parametrize(("tls", "scheme"), [({}, "http"), ({"tls": "/certificates"}, "https")])
def test_the_url_of_a_server_has_the_scheme_that_it_serves(
    tls: dict[str, str], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"address": "127.0.0.1:1", "http": "127.0.0.1:2"} | tls
    service = SimpleNamespace(wait_for=lambda *_: event, stop=lambda: 0)
    monkeypatch.setattr(local, "ServiceProcess", lambda *_: service)
    assert LocalServer("m").http_url == f"{scheme}://127.0.0.1:2"


@pytest.mark.parametrize(("asked", "is_small"), [(b"s", True), (b"sk", True), (b"sw", False), (b"k", False)])
def test_the_next_worker_has_the_pool_that_the_page_asked_for(
    asked: bytes, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(module: str, arguments: list[str], _: object, pipes: Sequence[int] = ()) -> SimpleNamespace:
        for pipe in pipes:  # as the scheduler would, later
            os.write(pipe, asked)
        started.append(arguments)
        status = 0 if len(started) == 3 else None
        process = SimpleNamespace(kill=lambda: None, poll=lambda: status)
        event = {"address": "127.0.0.1:1", "http": "127.0.0.1:2"}
        return SimpleNamespace(process=process, last_words="over", wait_for=lambda *_: event, stop=lambda: 0)

    monkeypatch.setattr(local, "ServiceProcess", start)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.0)
    with LocalServer("m", learns=True) as server, pytest.raises(local.ServerError, match="over"):
        server.wait()
    assert ("--num-gpu-blocks-override" in started[2]) is is_small


def test_children_of_the_program_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a checkout, whose packages have no compiled kernels."""
    (tmp_path / "pagewire_common.py").write_text("raise SystemExit('another package')")
    child = [sys.executable, "-c", "import pagewire_common.version"]
    statuses: list[int] = []
    monkeypatch.setattr(command, "main", lambda: statuses.append(subprocess.run(child, cwd=tmp_path).returncode))
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # as before, after this test
    command.program()
    assert statuses == [0]


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, doctor.Fact]:
    """A machine with 12.5 GB of free memory for models, and compiled kernels for AVX2."""
    monkeypatch.setattr(capacity, "free_host_bytes", lambda: 12_500_000_000)
    monkeypatch.setattr(backends, "backend_name", lambda _: "compiled for avx2")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "fma3": True, "f16c": True})
    monkeypatch.setattr(machine, "gpus", list)
    return {fact.name: fact for fact in doctor.examine(tmp_path / "not-there-yet")}


def test_the_doctor_says_which_models_fit(facts: dict[str, doctor.Fact]) -> None:
    """10 GB without the cache's share; a weight has 16 bits in bf16 and 5 in int4."""
    assert facts["models"].found == "billions of parameters: bf16 5.0, w8a8 9.4, int4 16.0"
    assert facts["models"].verdict == "fit, with 20% left for the KV cache; no int8 with these kernels"
    assert facts["instructions"][1:3] == ("avx2 f16c fma3", "kernels are compiled for avx2")
    assert all(fact.serves for fact in facts.values())


@pytest.mark.usefixtures("facts")
def test_on_a_gpu_its_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (10 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Card")
    monkeypatch.setattr(machine, "gpus", REAL_GPUS)
    facts = {fact.name: fact for fact in doctor._device()}
    assert facts["GPU"].found == "Card, 10.0 of 16.0 GiB free"
    assert facts["models"].found == "billions of parameters: bf16 4.3, fp8 8.6"


def test_the_doctor_fails_only_where_serving_is_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("doctor", "--cache", str(tmp_path))
    monkeypatch.setattr(machine, "is_free", lambda port: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    run(monkeypatch, *words)
    said = capsys.readouterr().out
    assert "no no-such-compiler" in said
    assert "in use" in said
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: ["torch==0", "no-such-package>1"])
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *words)
    assert end.value.code == 1
    assert "without no-such-package" in capsys.readouterr().out
    assert not doctor._memory(1 << 29).serves


def test_a_quota_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.memory_limit() is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert (machine.usable_cores(), machine.memory_limit()) == (0.5, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_limit() is None
