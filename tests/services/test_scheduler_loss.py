"""A scheduler that is killed or stopped while its clients read: they see a pause."""

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cluster import cluster_state, front_ends, halted, until_idle
from ports import free_address
from test_processes import WORKER_SIZES, Start
from test_processes import start as start

from bench.systems.processes import engine_process
from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import Output, collect
from pagewire_client.local import ServiceProcess

MAX_TOKENS = 100
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 1, "prompt_logprobs": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "min_tokens": 20, "frequency_penalty": 0.1},
    "a seed of the server's": {"temperature": 1.0, "n": 3},
    "a stop string that never comes": {"temperature": 1.0, "n": 2, "seed": 6, "stop": ["\N{WHITE STAR}" * 3, "e!!"]},
    "ended early": {"temperature": 1.0, "n": 2, "seed": 7, "stop_token_ids": [80, 90, 100, 110]},
    "best of several": {"temperature": 1.0, "n": 2, "best_of": 3, "seed": 8},
    "beams": {"n": 2, "beam_width": 3},
}


@pytest.fixture
def worker_process(start: Start, tiny_model_directory: Path) -> tuple[ServiceProcess, str]:
    return start("worker_service", "--model", str(tiny_model_directory), *WORKER_SIZES)


@pytest.fixture
def worker(worker_process: tuple[ServiceProcess, str]) -> str:
    return worker_process[1]


class Restartable:
    """A scheduler that comes back at the same address."""

    def __init__(self, start: Start, model: Path, worker: str, *arguments: str) -> None:
        self.admin_target = free_address()
        admin = ("--admin-listen", self.admin_target)
        self._start, self._arguments = start, ("--model", str(model), "--workers", worker, *admin, *arguments)
        self.process, self.target = start("scheduler_service", *self._arguments)

    def start_again(self, *arguments: str) -> ServiceProcess:
        self.process, _ = self._start("scheduler_service", *self._arguments, *arguments, listen=self.target)
        return self.process


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    sampling.MergeFrom(SamplingParams(**given))
    if sampling.HasField("beam_width"):
        sampling.max_tokens = 30
    return sampling


class Reading:
    """A stream as its caller sees it."""

    def __init__(self, client: Client, sampling: SamplingParams, progress: asyncio.Event) -> None:
        self.sampling = sampling
        self.progress = progress
        self.outputs = [Output() for _ in range(sampling.n or 1)]
        self.prompt_logprobs: list[pb.TokenLogprobs] = []
        self.seed: int | None = None
        self.num_tokens = 0
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: Client) -> None:
        async for message in client.generate("a prompt for all of them", self.sampling):
            output = self.outputs[message.index]
            assert not output.finish_reason
            output.text += message.text
            output.token_ids += message.token_ids
            output.finish_reason = message.finish_reason
            self.prompt_logprobs += message.prompt_logprobs
            self.num_tokens += len(message.token_ids)
            self.progress.set()
            if message.HasField("seed"):
                assert self.seed in (None, message.seed)
                self.seed = message.seed

    async def assert_undisturbed(self, client: Client) -> None:
        await self.task
        self.sampling.seed = self.seed
        whole = await collect(client, "a prompt for all of them", self.sampling)
        for mine, theirs in zip(self.outputs, whole.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.finish_reason) == (
                theirs.token_ids,
                theirs.text,
                theirs.finish_reason,
            )
        assert len(self.prompt_logprobs) == len(whole.prompt_logprobs)


async def until_received(num_tokens: int, *readings: Reading) -> None:
    """Wait until so many tokens have come in all."""
    while sum(reading.num_tokens for reading in readings) < num_tokens:
        readings[0].progress.clear()
        await readings[0].progress.wait()


@pytest.mark.parametrize("killed", ["scheduler", "engine"])
async def test_a_killed_process_is_a_pause_and_every_text_is_that_of_an_undisturbed_run(
    start: Start, worker: str, tiny_model_directory: Path, killed: str
) -> None:
    """Clients resume at the next scheduler. Of the engine's end they see nothing: this client never resumes."""
    scheduler = Restartable(start, tiny_model_directory, worker)
    async with Client(scheduler.target, retry_for=0 if killed == "engine" else 60) as client:
        await client.wait_until_serving(60)
        progress = asyncio.Event()
        readings = [Reading(client, sampling_params(given), progress) for given in SAMPLINGS.values()]
        for num_tokens in (30, 300):
            await until_received(num_tokens, *readings)
            assert not all(reading.task.done() for reading in readings)
            if killed == "engine":
                engine_process(scheduler.process.process.pid).kill()
                await asyncio.to_thread(scheduler.process.wait_for, "requests go on in the next engine", 60)
                continue
            scheduler.process.process.kill()
            await asyncio.to_thread(scheduler.process.process.wait)
            await asyncio.to_thread(scheduler.start_again)
        for reading in readings:
            await reading.assert_undisturbed(client)


async def test_texts_of_one_call_go_on_in_the_next_engine(
    start: Start, worker: str, tiny_model_directory: Path
) -> None:
    scheduler = Restartable(start, tiny_model_directory, worker)
    texts = [f"{number} " * (1 + number % 50) for number in range(600)]
    async with Client(scheduler.target, retry_for=0) as client:
        await client.wait_until_serving(60)
        undisturbed = await client.embed(texts)
        embedding = asyncio.create_task(client.embed(texts))
        while not (await cluster_state(scheduler.admin_target)).num_requests:
            assert not embedding.done()
        engine_process(scheduler.process.process.pid).kill()
        assert [one.data for one in await embedding] == [one.data for one in undisturbed]


@pytest.mark.parametrize("grace", ["0", "60"])
async def test_front_ends_are_replaced_one_after_the_other(
    start: Start, worker_process: tuple[ServiceProcess, str], tiny_model_directory: Path, grace: str
) -> None:
    """A stream goes on within the grace. Beyond, its last event says that it can be resumed elsewhere."""
    worker, target = worker_process
    scheduler = Restartable(start, tiny_model_directory, target, "--grace", grace)
    sampling = sampling_params({"temperature": 1.0, "n": 2, "seed": 3, "max_tokens": 220})
    async with Client(scheduler.target, retry_for=0) as client:
        await client.wait_until_serving(60)
        before = front_ends(scheduler.target)
        reading = Reading(client, sampling, asyncio.Event())
        await until_received(2, reading)
        with halted(worker):  # or the stream may end before its front end drains
            scheduler.process.process.send_signal(signal.SIGUSR1)
            await asyncio.to_thread(scheduler.process.wait_for, "front end drains", 60)
            if grace == "0":
                with pytest.raises(grpc.aio.AioRpcError, match="this front end ends for another one; resume the"):
                    await reading.task
        async with Client(scheduler.target, retry_for=0) as later:
            if grace == "60":
                await reading.assert_undisturbed(later)
            assert (await collect(later, "a prompt", sampling)).outputs[0].finish_reason
        gone, alive = await asyncio.to_thread(psutil.wait_procs, before, 30)
        assert (len(gone), alive) == (1, [])


@pytest.mark.parametrize("grace", ["0", "60"])
async def test_a_scheduler_that_is_stopped_hands_its_callers_to_the_next_one(
    start: Start,
    worker_process: tuple[ServiceProcess, str],
    tiny_model_directory: Path,
    grace: str,
) -> None:
    """Within the grace it finishes running requests; the next scheduler serves those that take longer or come later."""
    worker, target = worker_process
    scheduler = Restartable(start, tiny_model_directory, target)
    scheduler.process.stop()
    first = await asyncio.to_thread(scheduler.start_again, "--grace", grace)
    async with Client(scheduler.target) as client:
        await client.wait_until_serving(60)
        longest = {"temperature": 1.0, "n": 2, "max_tokens": 220}  # which the worker has room for
        early = Reading(client, sampling_params(longest), asyncio.Event())
        await until_received(2, early)
        with halted(worker):  # or the request may be through before the scheduler has heard of its end
            first.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(first.wait_for, "stopping", 30)
            late = Reading(client, sampling_params({"temperature": 1.0}), asyncio.Event())
            if grace == "0":
                assert await asyncio.to_thread(first.process.wait, 60) == 0
                assert not early.task.done()
        assert await asyncio.to_thread(first.process.wait, 60) == 0
        assert not late.num_tokens
        if grace == "60":
            await early.task
        await asyncio.to_thread(scheduler.start_again)
        await early.assert_undisturbed(client)
        await late.assert_undisturbed(client)


class Cuttable:
    """A port that leads to the server, and connections through it that can be cut."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._open: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._open += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pumps.append(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
        sink.transport.abort()

    async def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*self._pumps)
        self._open.clear()
        self._pumps.clear()


async def test_a_connection_that_is_cut_again_and_again_costs_no_token(tiny_server: LocalServer) -> None:
    """The scheduler lives on, and may not have noticed yet that the stream it serves has no reader any more."""
    cuttable = Cuttable(tiny_server.target)
    async with await asyncio.start_server(cuttable.connect, "127.0.0.1", 0) as server:
        async with Client(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            progress = asyncio.Event()
            samplings = [sampling_params(SAMPLINGS[name]) for name in ("seeded", "a stop string that never comes")]
            readings = [Reading(client, sampling, progress) for sampling in samplings]
            for num_cuts in range(1, 6):
                await until_received(50 * num_cuts, *readings)
                await cuttable.cut()
            for reading in readings:
                await reading.assert_undisturbed(client)
        server.close()
        await cuttable.cut()
    (state,) = (await until_idle(tiny_server.admin_target)).workers
    assert state.num_free_device_blocks == state.num_device_blocks
