"""The health service, without keys.

grpcio's own holds a lock while it writes: a watcher that does not read would block all others.
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from pagewire_common.calls.errors import PatientWriter, RequestError

MAX_WATCHES = 4096
MAX_SECONDS = 60.0
"""Seconds that a watcher may leave a status unread."""

Context = grpc.aio.ServicerContext[Any, Any]


class Health(HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """A status for each service name. Create the object inside the running event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, pb.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()
        self._num_watches = 0

    def set(self, service: str, *, serving: bool) -> None:
        status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:  # noqa: ARG002, N802
        if (status := self._statuses.get(request.service)) is None:
            raise RequestError(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:  # noqa: N802
        """Send the current status, then each change."""
        if self._num_watches >= MAX_WATCHES:
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._num_watches} watches are open already")
        service, last = request.service, None
        self._num_watches += 1
        writer = PatientWriter(context, MAX_SECONDS)
        try:
            while True:
                changed = self._changed
                status = self._statuses.get(service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    await writer.write(pb.HealthCheckResponse(status=status))
                await changed.wait()
        finally:
            self._num_watches -= 1
            writer.close()
