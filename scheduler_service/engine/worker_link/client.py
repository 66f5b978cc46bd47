"""The scheduler's calls to one worker, and the watch over its health."""

import asyncio
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Never

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_common.connection.misdirected import Direction
from pagewire_common.connection.tls import TlsFolder, secure_channel
from scheduler_service.engine.worker_link.errors import (
    AdapterCountError,
    AdapterFailedError,
    AdapterRefusedError,
    UnreachableError,
    WorkerError,
)
from scheduler_service.engine.worker_link.session import Session, StepSplit
from scheduler_service.wire.codec import WorkerInfo, decode_worker_info

# A vanished machine is noticed within 20 s, a returned worker within 2 s instead of gRPC's two minutes.
OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # each new channel opens a connection of its own
)
TOKENIZER_FILES = frozenset(
    (
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "config_sentence_transformers.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    )
)
MAX_FAILED_CHECKS = 3
MAX_TOKENIZER_BYTES = 256 << 20
ADAPTER_SECONDS = 300.0
"""Seconds for sending an adapter: gigabytes over a slow network."""
_PORT = "--workers names the workers' --listen, which has port 50052 unless told otherwise"
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)


class WorkerClient:
    """A channel to one worker, created inside the event loop. Every call may raise UnreachableError."""

    def __init__(self, address: str, tls: TlsFolder | None = None, identity: str = "") -> None:
        """With `tls`, the worker's certificate must contain `identity`, by default the address's host."""
        self.address = address
        self.epoch = 0
        """Epoch of the current or the next session, also for calls about adapters."""
        self._direction = Direction(address, tls is not None, "--worker-tls", _PORT)
        self._tls = tls
        self._identity = identity
        self._connect()

    def _connect(self) -> None:
        self._channel = secure_channel(self.address, self._tls, OPTIONS, identity=self._identity)
        self._stub = WorkerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def reconnect(self) -> None:
        """Open a new connection: the old one may be dead although it looks open."""
        await self._channel.close()
        self._connect()

    async def get_info(self) -> WorkerInfo:
        try:
            return decode_worker_info(await self._stub.GetWorkerInfo(worker_pb.GetWorkerInfoRequest(), timeout=5))
        except grpc.aio.AioRpcError as error:
            raise await self._unreachable(error) from None

    async def fetch_tokenizer(self) -> dict[str, bytes]:
        """The contents of the tokenizer files by name. Raises WorkerError for any other file."""
        files: dict[str, bytearray] = {}
        left = MAX_TOKENIZER_BYTES
        try:
            async for piece in self._stub.GetTokenizer(worker_pb.GetTokenizerRequest(), timeout=60):
                left -= len(piece.data)
                if piece.name not in TOKENIZER_FILES or left < 0:
                    raise WorkerError("the worker sent something that is not a tokenizer")
                files.setdefault(piece.name, bytearray()).extend(piece.data)
        except grpc.aio.AioRpcError as error:
            raise await self._unreachable(error) from None
        return {name: bytes(data) for name, data in files.items()}

    async def load_adapter(self, pieces: AsyncIterator[worker_pb.TakeAdapterRequest]) -> None:
        """Raises AdapterRefusedError, AdapterCountError if the worker has no place, AdapterFailedError, and errors of
        `pieces`.
        """
        failures: list[Exception] = []

        async def sent() -> AsyncIterator[worker_pb.TakeAdapterRequest]:
            epoch = self.epoch  # in the first piece only
            try:
                async for piece in pieces:
                    piece.epoch, epoch = epoch, 0
                    yield piece
            except Exception as error:  # gRPC would report a cancelled call in place of this error
                failures.append(error)
                raise

        try:
            await self._stub.TakeAdapter(sent(), timeout=ADAPTER_SECONDS)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if failures:
                raise failures[0] from None
            if isinstance(error, asyncio.CancelledError):
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise AdapterFailedError("the connection was closed") from None  # by `reconnect`
            reason = error.details() or error.code().name
            if error.code() in _REFUSALS:
                raise AdapterRefusedError(reason) from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise AdapterCountError(f"the worker has no place for an adapter: {reason}") from None
            raise AdapterFailedError(f"{error.code().name}: {reason}") from None

    async def unload_adapter(self, fingerprint: str) -> None:
        """Raises AdapterCountError."""
        try:
            request = worker_pb.DropAdapterRequest(fingerprint=fingerprint, epoch=self.epoch)
            await self._stub.DropAdapter(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            raise AdapterCountError(
                f"the worker does not forget an adapter: {await self._unreachable(error)}"
            ) from None

    async def is_serving(self, timeout: float) -> bool:
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return True  # no health service
            raise await self._unreachable(error) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def watch_serving(self) -> AsyncIterator[bool]:
        """Yield the health now and at each change, until the connection breaks."""
        call = self._health.Watch(health_pb2.HealthCheckRequest())
        try:
            async for answer in call:
                yield answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError:
            return
        finally:
            call.cancel()

    async def _unreachable(self, error: grpc.aio.AioRpcError) -> UnreachableError:
        error = await self._direction.explain(error)
        return UnreachableError(f"{error.code().name}: {error.details()}")

    def open_session(self, epoch: int, split: StepSplit) -> Session:
        return Session(self._stub.Execute(), epoch, split)

    async def close(self) -> None:
        await self._channel.close()


async def watch_health(client: WorkerClient, num_steps: Callable[[], int], interval: float) -> Never:
    """Raise WorkerError if the worker answers neither steps nor health checks, which a worker answers even during a
    step.

    `interval`: seconds between checks, and the limit of each.
    """
    while True:
        num_before = num_steps()
        await asyncio.sleep(interval)
        for _ in range(MAX_FAILED_CHECKS):
            if num_steps() != num_before or await _answers(client, interval):
                break
        else:
            raise WorkerError(f"the worker failed {MAX_FAILED_CHECKS} health checks in a row, of {interval:g} s each")


async def _answers(client: WorkerClient, timeout: float) -> bool:
    began = perf_counter()
    try:
        await client.is_serving(timeout)
    except UnreachableError:
        await asyncio.sleep(began + timeout - perf_counter())  # the check failed early
        return False
    return True


async def watch_leaving(client: WorkerClient, tell: Callable[[bool], None]) -> Never:
    """Call `tell` with whether the worker shuts down: now, and at each change."""
    async for is_serving in client.watch_serving():
        tell(not is_serving)
    await asyncio.Event().wait()  # the connection broke; the functions above decide whether the worker is lost
    raise AssertionError
