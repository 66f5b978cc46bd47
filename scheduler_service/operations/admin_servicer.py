"""AdminService: shows the cluster, drains workers, loads adapters and empties the prefix cache."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pagewire.v1 import admin_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceServicer
from pagewire_common.calls.errors import PatientWriter, RequestError
from scheduler_service.access.audit import note
from scheduler_service.engine.adapters.adapter_files import Adapter
from scheduler_service.engine.calls.side_calls import SideCalls
from scheduler_service.engine.front_ends.servicer import FrontEnds
from scheduler_service.operations.cluster_state import cluster_state
from scheduler_service.statistics.counts import MAX_REQUESTS

Context = grpc.aio.ServicerContext[Any, Any]

INTERVAL_MS = 1000
MIN_INTERVAL_MS = 100
MAX_INTERVAL_MS = 60_000
MAX_WATCHES = 64
NUM_FINISHED = 100


class AdminServicer(AdminServiceServicer):
    """The contract is in admin_service.proto. `close` ends all WatchClusterState calls."""

    def __init__(self, front_ends: FrontEnds) -> None:
        self._front_ends = front_ends
        self.engine = front_ends.engine
        self._closed = asyncio.Event()
        self._watches = SideCalls("WatchClusterState", max_calls=MAX_WATCHES, max_bytes=0)

    def close(self) -> None:
        self._closed.set()

    @property
    def commands(self) -> dict[str, Callable[[Any, Any], Awaitable[Any]]]:
        """The methods that pages may call, by the field of their request in `Administer`."""
        return {
            "drain_worker": self.DrainWorker,
            "undrain_worker": self.UndrainWorker,
            "reset_prefix_cache": self.ResetPrefixCache,
            "load_adapter": self.LoadAdapter,
            "unload_adapter": self.UnloadAdapter,
            "list_adapters": self.ListAdapters,
        }

    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.GetClusterStateResponse:
        return pb.GetClusterStateResponse(state=cluster_state(self._front_ends))

    async def WatchClusterState(  # type: ignore[override]  # a PatientWriter limits the time of a write
        self, request: pb.WatchClusterStateRequest, context: Context
    ) -> None:
        interval_ms = request.interval_ms if request.HasField("interval_ms") else INTERVAL_MS
        if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
            raise RequestError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"interval_ms is {interval_ms}; it must be in [{MIN_INTERVAL_MS}, {MAX_INTERVAL_MS}]",
            )
        writer = PatientWriter(context, self.engine.settings.stall_timeout)
        try:
            with self._watches.place():
                while not self._closed.is_set():
                    await writer.write(pb.WatchClusterStateResponse(state=cluster_state(self._front_ends)))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), interval_ms / 1000)
        finally:
            writer.close()
        raise RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")

    async def ListFinishedRequests(
        self, request: pb.ListFinishedRequestsRequest, context: Context
    ) -> pb.ListFinishedRequestsResponse:
        limit = request.limit if request.HasField("limit") else NUM_FINISHED
        if not 1 <= limit <= MAX_REQUESTS:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"limit is {limit}; it must be in [1, {MAX_REQUESTS}]")
        return pb.ListFinishedRequestsResponse(requests=self.engine.requests.finished.newest(limit))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        note(lora_name=request.name)
        return pb.LoadAdapterResponse(adapter=_adapter_info(await self.engine.adapters.load(request.name)))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        note(lora_name=request.name)
        await self.engine.adapters.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(_adapter_info, self.engine.adapters.catalogue.listed))

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(num_blocks=self.engine.workers.reset_prefix_cache())

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        note(worker=request.address)
        self.engine.fleet.drain(self.engine.workers.find(request.address))
        return pb.DrainWorkerResponse()

    async def UndrainWorker(self, request: pb.UndrainWorkerRequest, context: Context) -> pb.UndrainWorkerResponse:
        note(worker=request.address)
        self.engine.fleet.undrain(self.engine.workers.find(request.address))
        return pb.UndrainWorkerResponse()


def _adapter_info(adapter: Adapter) -> pb.AdapterInfo:
    return pb.AdapterInfo(name=adapter.name, fingerprint=adapter.fingerprint, num_bytes=adapter.num_bytes)
