"""The asyncio client of AdminService."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from pagewire.v1 import admin_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire_client.channel import OPERATORS_PORT, connect, direction, key_metadata, say_if_silent
from pagewire_client.retry import PASSING, Backoff

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """A cluster state, and its time of arrival on the monotonic clock."""

    at: float
    state: pb.ClusterState


@dataclass(frozen=True, slots=True)
class Lost:
    """The scheduler cannot be reached; the client tries again."""

    reason: str


class Admin:
    """A connection to the operators' port of a scheduler. Create it inside the event loop that uses it.

    `api_key` and `tls` are as in `Client`. Methods raise grpc.aio.AioRpcError with the server's status and message.
    """

    def __init__(self, target: str, *, api_key: str = "", tls: Path | None = None) -> None:
        self._metadata = key_metadata(api_key)
        self._target = target
        self._channel = connect(target, tls)
        self._explain = direction(target, tls, OPERATORS_PORT).explain
        self._stub = AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        self._connecting = asyncio.create_task(say_if_silent(self._channel, self._target))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connecting.cancel()
        await self._channel.close()

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._explain(error) from None

    async def state(self) -> Sample:
        response = await self._call(self._stub.GetClusterState, pb.GetClusterStateRequest())
        return Sample(time.monotonic(), response.state)

    async def finished_requests(self, limit: int = 100) -> list[pb.FinishedRequest]:
        """The requests that ended last, the newest first. `limit` is in [1, 1000]."""
        response = await self._call(self._stub.ListFinishedRequests, pb.ListFinishedRequestsRequest(limit=limit))
        return list(response.requests)

    async def drain(self, address: str) -> None:
        await self._call(self._stub.DrainWorker, pb.DrainWorkerRequest(address=address))

    async def undrain(self, address: str) -> None:
        await self._call(self._stub.UndrainWorker, pb.UndrainWorkerRequest(address=address))

    async def load_adapter(self, name: str) -> pb.AdapterInfo:
        """Load an adapter from the scheduler's --lora-dir."""
        response = await self._call(self._stub.LoadAdapter, pb.LoadAdapterRequest(name=name))
        return response.adapter

    async def unload_adapter(self, name: str) -> None:
        await self._call(self._stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name))

    async def adapters(self) -> list[pb.AdapterInfo]:
        response = await self._call(self._stub.ListAdapters, pb.ListAdaptersRequest())
        return list(response.adapters)

    async def reset_prefix_cache(self) -> int:
        """Returns the number of blocks that were in the cache."""
        response = await self._call(self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest())
        return response.num_blocks

    async def watch(self, interval: float) -> AsyncGenerator[Sample | Lost, None]:
        """Yield the state every `interval` seconds, for ever, and one `Lost` for each outage."""
        request = pb.WatchClusterStateRequest(interval_ms=round(interval * 1000))
        backoff = Backoff(float("inf"))
        is_lost = False
        while True:
            call = self._stub.WatchClusterState(request, metadata=self._metadata)
            try:
                async for response in call:
                    backoff.succeeded()
                    is_lost = False
                    yield Sample(time.monotonic(), response.state)
                pause = 0.0
            except grpc.aio.AioRpcError as error:
                error = await self._explain(error)
                pause = backoff.pause(error, PASSING)
                if not is_lost:
                    is_lost = True
                    yield Lost(f"{error.code().name}: {error.details()}")
            finally:
                call.cancel()
            await asyncio.sleep(pause)
