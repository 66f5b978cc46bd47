"""Commands of operators say what they did, and every program its version."""

import argparse
import asyncio
from importlib.metadata import version
from pathlib import Path

import pytest
from engines import submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import scheduler

from pagewire_client import __main__ as command_line
from pagewire_common.settings import load_settings
from scheduler_service.settings import SchedulerSettings
from worker_service.settings import WorkerSettings


def arguments(*words: str) -> argparse.Namespace:
    return command_line.parse_arguments([*words])


async def test_a_drain_that_waits_returns_when_the_worker_has_nothing_left(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "DRAIN_LOOK_SECONDS", 0.1)
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, scheduler(address) as one:
        (loop,) = one.engine.workers
        await until(lambda: loop.admits)
        worker.runs.clear()
        state = await submit(one.engine, "a", [5])
        await until(lambda: not one.engine.waiting)
        draining = asyncio.create_task(command_line.drain(arguments("drain", "--wait", address), one.admin_target))
        said = ""
        while "1 running and 0 swapped out there" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
        assert not draining.done()
        worker.runs.set()
        assert await text_of(one.engine, state) == "ggggg"
        await draining
        assert capsys.readouterr().out.endswith(f"{address} is drained\n")
        await command_line.drain(arguments("undrain", address), one.admin_target)
        assert capsys.readouterr().out.endswith(f"{address} is given requests again\n")
        await command_line.drain(arguments("drain", address), one.admin_target)
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


@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_a_wait_is_a_number_of_seconds_from_0_on(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("generate", "hi", "--retry-for", seconds)
    assert "--retry-for" in capsys.readouterr().err
