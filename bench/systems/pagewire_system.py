"""Starts pagewire's scheduler and a worker, and sends loads to them over gRPC."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from bench.loads.drive import Stream
from bench.loads.load import CONTEXT
from pagewire.v1.admin_service_pb2 import GetClusterStateRequest, StepSplit, WorkerState
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire.v1.worker_service_pb2 import GetWorkerInfoRequest
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_common.connection.channel import open_channel
from scheduler_service.core.config import blocks_of_tokens
from scheduler_service.engine.worker_link.limits import scheduler_config
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import WorkerInfo, decode_worker_info


async def grpc_stream(client: Client) -> Stream:
    """Streams of a running server, whose connection is opened before the measurement."""
    await client.get_model()

    async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        async for message in client.generate(prompt, sampling):
            if message.token_ids:
                yield len(message.token_ids)

    return stream


class Pagewire:
    """A running scheduler and worker. `model` is a folder or a GGUF file, `flags` are the worker's.

    By default the worker chooses its GiB of keys and values. Raises ServerError if a service does not start.
    """

    name = "pagewire"

    def __init__(
        self,
        model: Path,
        cache_gib: float | None,
        *flags: str,
        context: int = CONTEXT,
        dtype: str = "bfloat16",
        scheduler_flags: Sequence[str] = (),
    ) -> None:
        began = time.perf_counter()
        cache = () if cache_gib is None else ("--kv-cache-memory", str(cache_gib))
        self._server = LocalServer(
            str(model),
            scheduler_arguments=scheduler_flags,
            worker_arguments=["--dtype", dtype, "--max-model-len", str(context), *cache, *flags],
        )
        self._block_bytes: int | None = None
        self.start_seconds = time.perf_counter() - began
        self.target, self.http_url = self._server.target, self._server.http_url

    def pids(self) -> list[int]:
        return [service.process.pid for service in self._server.processes]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async with Client(self._server.target) as client:
            yield await grpc_stream(client)

    async def step_split(self) -> StepSplit:
        """Time of each phase of the worker's steps since the scheduler started."""
        return (await self._worker()).step_split

    async def sequence_bytes(self, num_tokens: int) -> int:
        """Maximum of the KV cache that one sequence of `num_tokens` tokens takes, states included."""
        info = await self._worker_info()
        config = scheduler_config(SchedulerSettings.model_validate({}), info)
        return info.block_bytes * blocks_of_tokens(config.groups, num_tokens, config.largest_chunk)

    async def used_bytes(self) -> int:
        """The KV cache that sequences use now."""
        if self._block_bytes is None:
            self._block_bytes = (await self._worker_info()).block_bytes
        worker = await self._worker()
        return self._block_bytes * (worker.num_device_blocks - worker.num_free_device_blocks)

    async def _worker_info(self) -> WorkerInfo:
        async with open_channel((await self._worker()).address, None) as channel:
            return decode_worker_info(await WorkerServiceStub(channel).GetWorkerInfo(GetWorkerInfoRequest()))

    async def _worker(self) -> WorkerState:
        async with open_channel(self._server.admin_target, None) as channel:
            response = await AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())
        (worker,) = response.state.workers
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
