"""pagewire_client watch, drain and undrain: on a terminal, in a pipe, and through a scheduler's restart."""

import asyncio
import io
import os
import pty
import signal
import sys
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import grpc
import pytest
from fake_worker_service import FakeWorkerService, serving
from ports import free_address
from rich.console import Console
from scheduler_in_process import scheduler
from test_client import command_line

from pagewire.v1 import admin_service_pb2 as pb
from pagewire_client import LocalServer
from pagewire_client.admin import Admin, Lost, Sample
from pagewire_client.cli.watch import Rates, View

WORKER = pb.WorkerState(
    address="10.0.0.7:50052",
    status=pb.WORKER_STATUS_SERVING,
    num_running=3,
    num_device_blocks=200,
    num_free_device_blocks=150,
    num_steps=100,
)


def sample(at: float, **state: object) -> Sample:
    return Sample(at, pb.ClusterState(**({"start_time_ms": 1, "workers": [WORKER]} | state)))  # type: ignore[arg-type]


def drawn(view: View) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(view)
    return out.getvalue()


def test_rates_are_differences_of_the_same_process_and_worker() -> None:
    before = sample(10.0, num_output_tokens=1000, num_prompt_tokens=50)
    grown = pb.WorkerState(address=WORKER.address, num_steps=150)
    new = pb.WorkerState(address="10.0.0.8:50052", num_steps=9)
    after = sample(12.0, num_output_tokens=1500, num_prompt_tokens=150, workers=[grown, new])
    assert Rates.between(before, after) == Rates(250.0, 50.0, {WORKER.address: 25.0})
    assert Rates.between(None, after) == Rates()
    assert Rates.between(before, sample(12.0, start_time_ms=2, num_output_tokens=5)) == Rates()


def test_the_picture_and_the_line_tell_the_same() -> None:
    lost = pb.WorkerState(
        address="10.0.0.8:50052", status=pb.WORKER_STATUS_CONNECTING, num_losses=2, last_error="gone [bold]away[/]"
    )
    view = View("there:1")
    view.take(sample(0.0))
    view.take(sample(2.0, num_waiting=5, num_requests=8, num_output_tokens=500, num_losses=2, workers=[WORKER, lost]))
    picture = drawn(view)
    for words in ("there:1", "5 waiting", "3 running", "250.0 tokens/s out", "10.0.0.7:50052", "serving", "50/200"):
        assert words in picture
    assert "gone [bold]away[/]" in picture  # as it is: what a worker says is not markup
    line = view.line()
    for words in ("requests=8 waiting=5 running=3", "workers=1/2", "blocks=25%", "output_tokens/s=250.0", "losses=2"):
        assert words in line


def test_the_share_of_accepted_drafts_is_shown_where_there_are_any() -> None:
    view = View("there:1")
    view.take(sample(0.0))
    assert "guess" not in drawn(view) + view.line()
    guessing = pb.WorkerState(num_guessed_tokens=30, num_accepted_tokens=12)
    view.take(sample(2.0, workers=[WORKER, guessing, guessing]))
    assert "40% of drafts accepted" in drawn(view)
    assert "guessed_right=40%" in view.line()


def test_the_share_of_kept_images_is_shown_where_there_are_any() -> None:
    view = View("there:1")
    view.take(sample(0.0))
    assert "images" not in drawn(view) + view.line()
    view.take(sample(2.0, workers=[WORKER, pb.WorkerState(num_encoder_queries=8, num_encoder_hits=2)]))
    assert "25% of images kept" in drawn(view)
    assert "images_kept=25%" in view.line()


def test_the_blocks_of_groups_of_layers_are_shown_where_a_worker_has_several() -> None:
    full, states = (
        pb.LayerGroupState(kind="full", num_held_blocks=40, num_cached_blocks=9),
        pb.LayerGroupState(kind="states", num_held_blocks=2, num_cached_blocks=5),
    )
    window = pb.LayerGroupState(kind="window 512", num_held_blocks=7, num_cached_blocks=1)
    plain = pb.WorkerState(address="10.0.0.8:50052", layer_groups=[full])
    view = View("there:1")
    view.take(sample(0.0, workers=[WORKER, plain]))
    assert "held" not in drawn(view)
    assert "full" not in drawn(view) + view.line()
    hybrid = pb.WorkerState(address="10.0.0.9:50052", layer_groups=[full, window, states, states])
    view.take(sample(2.0, workers=[WORKER, plain, hybrid]))
    blocks = "10.0.0.9:50052: blocks held+cached of layers full: 40+9, window 512: 7+1, states: 4+10"
    assert blocks in drawn(view)
    assert "full=40+9 window_512=7+1 states=4+10" in view.line()


def test_why_front_ends_do_not_serve_is_shown() -> None:
    view = View("there:1")
    view.take(sample(0.0, front_end_error="a front end [bold]cannot[/]"))
    assert "a front end [bold]cannot[/]" in drawn(view)
    assert view.line().endswith("\na front end [bold]cannot[/]")


def test_a_lost_scheduler_is_news_and_one_that_was_started_again_too() -> None:
    view = View("there:1")
    assert "connecting" in drawn(view)
    view.take(Lost("UNAVAILABLE: no server"))
    assert "UNAVAILABLE: no server" in view.line()
    view.take(sample(0.0))
    assert "\n" not in view.line()
    view.take(Lost("UNAVAILABLE: gone"))
    assert "connection lost, trying again: UNAVAILABLE: gone" in view.line()
    assert "10.0.0.7:50052" in drawn(view)  # as it was last seen
    view.take(sample(1.0))
    assert "connected again\n" in view.line()
    view.take(sample(2.0))
    assert "\n" not in view.line()
    view.take(sample(3.0, start_time_ms=2))
    assert "the scheduler was started again at" in view.line()
    assert "the scheduler was started again at" in drawn(view)


async def test_a_watch_goes_on_when_the_scheduler_is_back(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, AsyncExitStack() as second:
        async with AsyncExitStack() as first:
            one = await first.enter_async_context(scheduler(address, admin_listen=free_address()))
            admin = await second.enter_async_context(Admin(one.admin_target))
            events = await second.enter_async_context(aclosing(admin.watch(0.1)))
            before = await anext(events)
            await one.engine.model()
            assert isinstance(before, Sample)
        while not isinstance(event := await anext(events), Lost):
            pass
        assert event.reason
        other = await second.enter_async_context(scheduler(address, admin_listen=one.admin_target))
        after = await anext(events)  # the loss is reported once, however long it lasts
        assert isinstance(after, Sample)
        assert after.state.start_time_ms != before.state.start_time_ms
        await other.engine.model()  # the fake worker cannot be interrupted while it sends the tokenizer


async def test_a_refusal_ends_the_watch(byte_tokenizer_directory: Path) -> None:
    async with scheduler("127.0.0.1:1") as one, Admin(one.admin_target) as admin:
        with pytest.raises(grpc.aio.AioRpcError, match="interval_ms is 10"):
            await anext(admin.watch(0.01))


def test_once_is_a_line_in_a_pipe_and_an_error_without_a_server(tiny_server: LocalServer) -> None:
    result = command_line("watch", "--once", "--target", tiny_server.admin_target)
    assert result.returncode == 0
    assert "workers=1/1" in result.stdout
    assert len(result.stdout.splitlines()) == 1
    result = command_line("watch", "--once", "--target", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("pagewire_client: UNAVAILABLE: ")


async def test_in_a_pipe_there_is_a_line_for_every_interval(tiny_server: LocalServer) -> None:
    arguments = ("-m", "pagewire_client", "watch", "--interval", "0.1", "--target", tiny_server.admin_target)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=-1, stderr=-1)
    assert process.stdout is not None
    for _ in range(3):
        assert b"workers=1/1" in await asyncio.wait_for(process.stdout.readline(), 60)
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")


async def test_on_a_terminal_it_is_a_picture(tiny_server: LocalServer) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pagewire_client", "watch", "--interval", "0.1", "--target", tiny_server.admin_target),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "140"},
    )
    os.close(theirs)
    seen = b""
    while seen.count(b"tokens/s out") < 3 or b"serving" not in seen:
        seen += await asyncio.to_thread(os.read, ours, 4096)
    assert b"\x1b[" in seen
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    os.close(ours)


async def test_a_worker_is_drained_and_undrained_from_a_shell(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:

        async def run(*arguments: str) -> tuple[int, str]:
            result = await asyncio.to_thread(command_line, *arguments, "--target", one.admin_target)
            return result.returncode, result.stderr

        assert await run("drain", address) == (0, "")
        assert one.engine.workers.all[0].draining
        assert await run("undrain", address) == (0, "")
        assert not one.engine.workers.all[0].draining
        status, sentence = await run("drain", "nowhere:1")
        assert status == 1
        assert sentence.startswith("pagewire_client: NOT_FOUND: ")
        assert "nowhere:1" in sentence
