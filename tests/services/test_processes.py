"""The services as processes: starting, failing to start, losing each other, stopping.

One model that is not there is asked for as `python -m` does it, and so are the services of one test started; the rest
are forked.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_address, free_port

from pagewire_client import Client, SamplingParams, local
from pagewire_client.llm import collect
from pagewire_client.local import ServiceProcess

Start = Callable[..., tuple[ServiceProcess, str]]
WORKER_SIZES = ("--num-gpu-blocks-override", "64", "--block-size", "8", "--threads", "1", "--swap-space", "0")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a service and returns it with its address; whatever is left is killed at the end."""
    processes: list[ServiceProcess] = []

    def start(module: str, *arguments: str, listen: str = "") -> tuple[ServiceProcess, str]:
        process = ServiceProcess(module, ["--listen", listen or free_address(), *arguments])
        processes.append(process)
        return process, str(process.wait_for("listening", 60)["address"])

    yield start
    for process in processes:
        process.process.kill()
        process.stop()


@dataclass(frozen=True)
class Ended:
    returncode: int
    stderr: str


def run(module: str, *arguments: str, **environment: str) -> Ended:
    with patch.dict(os.environ, environment):
        process = local.start_process(module, arguments)
    assert process.stderr is not None
    with process.stderr as stderr:
        said = stderr.read()
    return Ended(process.wait(60), said)


@pytest.mark.parametrize("module", ["scheduler_service", "worker_service"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "nothing.gguf"], "nothing.gguf"),
        (["--listen", "nonsense"], "--listen: 'nonsense' is not HOST:PORT"),
        (["--grace", "nan"], "--grace"),
        (["--log-level", "loud"], "--log-level"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_sentence(module: str, arguments: list[str], sentence: str) -> None:
    assert_says_why(module, arguments, sentence)


@pytest.mark.usefixtures("true_starts")
@pytest.mark.parametrize("module", ["scheduler_service", "worker_service"])
def test_a_service_whose_model_is_not_there_says_so_in_one_sentence(module: str) -> None:
    assert_says_why(module, ["--model", "/nowhere/model"], "/nowhere/model")


def assert_says_why(module: str, arguments: list[str], sentence: str) -> None:
    if "--listen" not in arguments:
        arguments = ["--listen", "127.0.0.1:0", *arguments]
    result = run(module, *arguments)
    assert result.returncode != 0
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith(f"{module}: ")


@pytest.mark.parametrize("module", ["scheduler_service", "worker_service"])
def test_a_port_in_use_is_an_error_at_once(module: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run(module, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert result.returncode == 1
    assert "in use by another process" in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_come_from_the_environment_too() -> None:
    result = run("scheduler_service", PAGEWIRE_WATERMARK="2")
    assert result.returncode == 1
    assert "--watermark: Input should be less than 1" in result.stderr


@pytest.mark.parametrize(
    ("service", "variable"),
    [("scheduler", "API_KEY"), ("scheduler", "API_KEYS"), ("scheduler", "TLS"), ("worker", "SCHEDULER_IDENTITY")],
)
def test_a_lock_of_the_environment_that_is_empty_does_not_open_the_service(service: str, variable: str) -> None:
    result = run(f"{service}_service", "--listen", "127.0.0.1:0", **{f"PAGEWIRE_{variable}": ""})
    assert result.returncode == 1
    assert f"PAGEWIRE_{variable} is empty, which would leave the service open" in result.stderr


@pytest.mark.parametrize(
    ("flag", "value", "bound"),
    [
        ("--watermark", "1", "less than 1"),
        ("--scheduling-policy", "lottery", "'lottery' is no policy; there are fcfs, priority, fair"),
        ("--max-num-batched-tokens", "0", "greater than or equal to 1"),
        ("--max-in-flight-steps", "0", "greater than or equal to 1"),
        ("--delay-factor", "inf", "a finite number"),
        ("--delay-factor", "2", "give --phase-rule separate as well"),
        ("--tenant-weights", '{"a": Infinity}', "a finite number"),
        ("--resume-secret", "too short", "it must have at least 16 characters\n"),  # and is not shown
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_field_and_the_bound(flag: str, value: str, bound: str) -> None:
    result = run("scheduler_service", flag, value)
    assert result.returncode == 1
    assert f"{flag}: " in result.stderr
    assert bound in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unreadable_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{half a")
    result = run("worker_service", "--listen", "127.0.0.1:0", "--model", str(tmp_path))
    assert result.returncode == 1
    assert "config.json" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


async def test_a_scheduler_without_a_worker_is_not_serving_and_requests_end_unavailable(start: Start) -> None:
    scheduler, target = start(
        "scheduler_service", "--workers", f"127.0.0.1:{free_port()}", "--no-worker-timeout", "0.5"
    )
    async with Client(target, retry_for=0) as client, grpc.aio.insecure_channel(target) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(client, "hello")
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no worker took requests for 0.5 s" in str(error.value.details())
    assert scheduler.stop() == 0


async def test_a_worker_of_another_model_is_refused_with_both_names(start: Start, tiny_model_directory: Path) -> None:
    _, address = start("worker_service", "--model", str(tiny_model_directory), *WORKER_SIZES)
    scheduler, _ = start("scheduler_service", "--workers", address, "--model", "default")
    while "serves the model" not in (reason := str(scheduler.wait_for("worker unavailable", 60)["reason"])):
        pass
    assert "'tiny-llama'" in reason
    assert "'default'" in reason


@pytest.mark.usefixtures("true_starts")
async def test_sigterm_lets_streams_finish_admits_no_more_and_exits_0(start: Start, tiny_model_directory: Path) -> None:
    model = str(tiny_model_directory)
    worker, address = start("worker_service", "--model", model, *WORKER_SIZES)
    scheduler, target = start("scheduler_service", "--model", model, "--workers", address)
    async with Client(target, retry_for=0) as client:
        await client.wait_until_serving(60)
        stream = client.generate("hello", SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        scheduler.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(scheduler.wait_for, "stopping", 30)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(client, "too late")
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [message async for message in stream][-1].usage.output_tokens == 400
    assert await asyncio.to_thread(scheduler.process.wait, 30) == 0
    assert worker.stop() == 0


async def test_streams_that_outlast_the_grace_end_unavailable(start: Start, tiny_model_directory: Path) -> None:
    model = str(tiny_model_directory)
    _, address = start("worker_service", "--model", model, *WORKER_SIZES)
    scheduler, target = start("scheduler_service", "--model", model, "--workers", address, "--grace", "0")
    async with Client(target, retry_for=0) as client:
        await client.wait_until_serving(60)
        stream = client.generate("hello", SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)
        scheduler.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stream:
                pass
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in str(error.value.details())
    assert await asyncio.to_thread(scheduler.process.wait, 30) == 0


async def test_an_idle_worker_that_stops_exits_0_and_its_successor_is_found(
    start: Start, tiny_model_directory: Path
) -> None:
    model = str(tiny_model_directory)
    worker, address = start("worker_service", "--model", model, *WORKER_SIZES)
    _, target = start("scheduler_service", "--model", model, "--workers", address)
    async with Client(target) as client:
        await client.wait_until_serving(60)
        before = await collect(client, "hello", SamplingParams(max_tokens=3))
        assert worker.stop() == 0
        waiting = asyncio.create_task(collect(client, "hello", SamplingParams(max_tokens=3)))
        start("worker_service", "--model", model, *WORKER_SIZES, listen=address)
        assert (await waiting).outputs == before.outputs


async def test_killing_the_worker_is_a_pause_not_an_error(start: Start, tiny_model_directory: Path) -> None:
    """Its successor computes the tokens so far anew and goes on; the streams see only a pause."""
    model = str(tiny_model_directory)
    worker, address = start("worker_service", "--model", model, *WORKER_SIZES)
    _, target = start("scheduler_service", "--model", model, "--workers", address)
    prompts = [f"prompt number {number}" for number in range(4)]
    sampling = SamplingParams(n=2, max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    async with Client(target) as client:
        await client.wait_until_serving(60)
        undisturbed = [await collect(client, prompt, sampling) for prompt in prompts]
        first_tokens = asyncio.Event()

        async def disturbed(prompt: str) -> list[list[int]]:
            tokens: list[list[int]] = [[], []]
            async for message in client.generate(prompt, sampling):
                tokens[message.index] += message.token_ids
                if sum(map(len, tokens)) > 10:
                    first_tokens.set()
            return tokens

        streams = [asyncio.create_task(disturbed(prompt)) for prompt in prompts]
        await first_tokens.wait()
        worker.process.kill()
        await asyncio.to_thread(worker.process.wait)  # its port is free when its memory is, which is not at once
        start("worker_service", "--model", model, *WORKER_SIZES, listen=address)
        for completion, stream in zip(undisturbed, streams, strict=True):
            assert await stream == [output.token_ids for output in completion.outputs]
