"""Commands of operators say what they did, and every program its version."""

import argparse
import asyncio
from importlib.metadata import version
from pathlib import Path

import pytest
from engines import submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import scheduler

from pagewire_client.cli import operators
from pagewire_client.cli.flag_values import access
from pagewire_client.cli.operator_options import DEFAULT_ADMIN_TARGET
from pagewire_client.cli.parser import parse_arguments
from pagewire_client.cli.serve_options import DEFAULT_HTTP_LISTEN
from pagewire_client.files import read_stdin
from pagewire_common.settings import load_settings
from scheduler_service.settings import SchedulerSettings
from worker_service.settings import WorkerSettings


def arguments(*words: str) -> argparse.Namespace:
    return parse_arguments([*words])


async def test_a_drain_that_waits_returns_when_the_worker_has_nothing_left(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operators, "DRAIN_LOOK_SECONDS", 0.1)
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, scheduler(address) as one:
        (loop,) = one.engine.workers.all
        await until(lambda: loop.admits)
        worker.runs.clear()
        state = await submit(one.engine, "a", [5])
        await until(lambda: not one.engine.requests.waiting)
        draining = asyncio.create_task(operators.drain(arguments("drain", "--wait", address), one.admin_target))
        said = ""
        while "1 running and 0 swapped out there" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
        assert not draining.done()
        worker.runs.set()
        assert await text_of(one.engine, state) == "ggggg"
        await draining
        known = "has no request of this scheduler, which has no session with it"
        assert capsys.readouterr().out.endswith(f"{address} {known}: drained by an operator\n")
        await operators.drain(arguments("undrain", address), one.admin_target)
        assert capsys.readouterr().out.endswith(f"{address} is given requests again\n")
        await operators.drain(arguments("drain", address), one.admin_target)
        assert capsys.readouterr().out.endswith(f"{address} is given no more requests\n")


def test_every_program_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    programs = {
        "pagewire_client": lambda: arguments("--version"),
        "scheduler_service": lambda: load_settings(SchedulerSettings, "scheduler_service", ["--version"]),
        "worker_service": lambda: load_settings(WorkerSettings, "worker_service", ["--version"]),
    }
    for name, start in programs.items():
        with pytest.raises(SystemExit) as end:
            start()
        assert end.value.code == 0
        assert capsys.readouterr().out == f"{name} {version('pagewire')}\n"


async def test_a_drain_that_waits_says_why_there_is_no_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operators, "DRAIN_LOOK_SECONDS", 0.1)
    async with scheduler("127.0.0.1:1") as one:
        (loop,) = one.engine.workers.all
        await until(lambda: loop.last_error != "")
        await operators.drain(arguments("drain", "--wait", "127.0.0.1:1"), one.admin_target)
        assert "127.0.0.1:1 has no request of this scheduler" in (out := capsys.readouterr().out)
        assert f"which has no session with it: {loop.last_error}\n" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("generate hi --retry-for nan", "--retry-for: nan is not in [0, inf]"),
        ("generate hi --retry-for -1", "--retry-for: -1 is not in [0, inf]"),
        ("generate hi --retry-for soon", "--retry-for: 'soon' is no number of seconds"),
        ("watch --interval nan", "--interval: nan is not in [0.1, 60]"),
        ("watch --interval 0", "--interval: 0 is not in [0.1, 60]"),
        ("watch --interval -1", "--interval: -1 is not in [0.1, 60]"),
        ("serve --port 65536", "--port: 65536 is not in [0, 65535]"),
        ("requests --limit 99999999999", "--limit: 99999999999 is not in [1, 1000]"),
        ("requests --limit 1.5", "--limit: '1.5' is no whole number"),
        (f"requests --limit {'9' * 5000}", "is no whole number"),
        ("embed a --dimensions -1", "--dimensions: -1 is not in [0, 4294967295]"),
        ("score a b --top-n 4294967296", "--top-n: 4294967296 is not in [0, 4294967295]"),
        ("generate a --priority 2147483648", "--priority: 2147483648 is not in [-2147483648, 2147483647]"),
        ("generate a --seed -1", "--seed: -1 is not in [0, 18446744073709551615]"),
        ("drain --target= a", "--target: it is empty"),
        ("watch --tls=", "--tls: it is empty"),
        ("transcribe /tmp", "file: cannot read /tmp: Is a directory"),
        ("transcribe /dev/zero", "file: /dev/zero has more than the limit of 16777216 bytes"),
        ("generate a --grammar @/dev/zero", "--grammar: /dev/zero has more than the limit of 16777216 bytes"),
        ("generate a --json-schema @/nowhere", "--json-schema: cannot read /nowhere: No such file"),
    ],
    ids=lambda text: text[:40],
)
def test_a_flag_that_cannot_be_followed_is_named_with_its_limit(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(*words.split(" "))
    assert sentence in capsys.readouterr().err


def test_an_empty_variable_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "TLS",
        "CLIENT_TLS",
        "CLIENT_API_KEY",
        "TARGET",
        "ADMIN_TARGET",
        "HTTP_LISTEN",
        "HTTP_PORT",
        "OTLP_TRACES_ENDPOINT",
        "METRICS_LISTEN",
    )
    for name in (*names, "MAX_NUM_SEQS", "WORKERS"):
        monkeypatch.setenv(f"PAGEWIRE_{name}", "")
    found = arguments("watch")
    assert (found.target, found.tls, found.api_key) == (DEFAULT_ADMIN_TARGET, None, "")
    served = arguments("serve")
    assert (served.listen, served.target) == (DEFAULT_HTTP_LISTEN, None)
    monkeypatch.delenv("PAGEWIRE_TLS")  # which would leave the service open
    settings = load_settings(SchedulerSettings, "scheduler_service", ["--workers", "localhost:1"])
    default = SchedulerSettings.model_fields["max_num_seqs"].default
    assert (settings.metrics_listen, settings.max_num_seqs) == (None, default)


def test_a_prompt_from_stdin_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        with pytest.raises(ValueError, match="stdin has more than the limit of 16777216 bytes"):
            read_stdin()


def test_a_client_has_settings_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PAGEWIRE_TLS", "/of-the-server")
    monkeypatch.setenv("PAGEWIRE_API_KEY", "of the server")
    monkeypatch.setenv("PAGEWIRE_CLIENT_TLS", "/mine")
    monkeypatch.setenv("PAGEWIRE_CLIENT_API_KEY", "mine")
    for words in (("watch",), ("generate", "hi", "--target", "elsewhere:1")):
        found = arguments(*words)
        assert access(found) == {"tls": Path("/mine"), "api_key": "mine"}
    assert arguments("watch", "--tls", "/given").tls == Path("/given")
    assert capsys.readouterr().err == ""


def test_a_server_of_a_commands_own_is_asked_with_the_servers_key_and_without_tls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TLS", "CLIENT_TLS"):
        monkeypatch.setenv(f"PAGEWIRE_{name}", "/elsewhere")
    monkeypatch.setenv("PAGEWIRE_API_KEY", "of the server")
    monkeypatch.setenv("PAGEWIRE_CLIENT_API_KEY", "for elsewhere")
    assert access(arguments("generate", "hi")) == {"tls": None, "api_key": "of the server"}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("unset", [None, ""])
def test_the_servers_variables_are_a_clients_for_one_release_and_say_so(
    unset: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEWIRE_TLS", "/old")
    monkeypatch.setenv("PAGEWIRE_API_KEY", "old")
    if unset is not None:
        monkeypatch.setenv("PAGEWIRE_CLIENT_TLS", unset)
        monkeypatch.setenv("PAGEWIRE_CLIENT_API_KEY", unset)
    assert access(arguments("watch")) == {"tls": Path("/old"), "api_key": "old"}
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == [
        "PAGEWIRE_TLS is a server's setting",
        "PAGEWIRE_API_KEY is a server's setting",
    ]
    assert "PAGEWIRE_CLIENT_TLS, and the old name goes with the next release" in said[0]


def test_http_is_served_where_a_flag_or_its_parts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments("serve", "--port", "80").listen == "127.0.0.1:80"
    assert arguments("serve", "--host", "::", "--port", "80").listen == "[::]:80"
    monkeypatch.setenv("PAGEWIRE_HTTP_LISTEN", "0.0.0.0:8000")  # as in the image
    assert arguments("serve", "--port", "80").listen == "0.0.0.0:80"
    monkeypatch.setenv("PAGEWIRE_HTTP_PORT", "tcp://10.0.0.1:80")  # as Kubernetes makes it of a Service
    assert arguments("serve").listen == "0.0.0.0:8000"
    monkeypatch.setenv("PAGEWIRE_HTTP_PORT", "81")
    assert arguments("serve").listen == "0.0.0.0:81"
    assert arguments("serve", "--listen", "localhost:1").listen == "localhost:1"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("serve --listen localhost:1 --port 2", "--host and --port are parts of --listen; give one or the other"),
        ("serve --port 65536", "--port: 65536 is not in [0, 65535]"),
    ],
)
def test_parts_of_an_address_that_contradict_it_are_refused(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(*words.split(" "))
    assert sentence in capsys.readouterr().err
