"""AdminService at the port of clients: every call goes on to the engine, which knows the cluster."""

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from pagewire.v1 import admin_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceServicer, AdminServiceStub
from pagewire_common.errors import RequestError
from scheduler_service.frontend.engine_link import GONE, SHUTTING_DOWN, EngineLink
from scheduler_service.frontend.patient_writer import PatientWriter

_ENGINES_OWN = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class AdminForwarder(AdminServiceServicer):
    """See the .proto for the service's contract."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._engine = AdminServiceStub(link.channel)

    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.GetClusterStateResponse:
        return await _answer(self._engine.GetClusterState(request))

    async def WatchClusterState(  # type: ignore[override]  # it writes itself, to bound how long a write may take
        self, request: pb.WatchClusterStateRequest, context: Context
    ) -> None:
        writer = PatientWriter(context, self._link.stall_timeout)
        call = self._engine.WatchClusterState(request)
        try:
            while (state := await _answer(call.read())) is not grpc.aio.EOF:
                await writer.write(state)
            await _answer(_end(call))
        finally:
            call.cancel()
            writer.close()

    async def ListFinishedRequests(
        self, request: pb.ListFinishedRequestsRequest, context: Context
    ) -> pb.ListFinishedRequestsResponse:
        return await _answer(self._engine.ListFinishedRequests(request))

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        return await _answer(self._engine.DrainWorker(request))

    async def UndrainWorker(self, request: pb.UndrainWorkerRequest, context: Context) -> pb.UndrainWorkerResponse:
        return await _answer(self._engine.UndrainWorker(request))


async def _end(call: Any) -> None:
    if (code := await call.code()) is not grpc.StatusCode.OK:
        raise _error(code, await call.details())


async def _answer(answer: Awaitable[T]) -> T:
    """The engine's answer, or its error."""
    try:
        return await answer
    except grpc.aio.AioRpcError as error:
        raise _error(error.code(), error.details()) from None


def _error(code: grpc.StatusCode, details: str | None) -> RequestError:
    """What the engine says to a client; what gRPC says of the connection names the socket, which is not for clients."""
    if details and (code in _ENGINES_OWN or details == str(SHUTTING_DOWN)):
        return RequestError(code, details)
    return RequestError(GONE.code, str(GONE))
