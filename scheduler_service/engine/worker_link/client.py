"""The scheduler's client of one worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from time import perf_counter_ns
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_common.connection.misdirected import Direction
from pagewire_common.connection.tls import TlsFolder, secure_channel
from scheduler_service.core import ModelOutput, SchedulerOutput
from scheduler_service.engine.worker_link.step_split import RoundTrips, StepSplit
from scheduler_service.wire.codec import WorkerInfo, decode_model_output, decode_worker_info, encode_scheduler_output

# If a worker's machine disappears without closing the connection, the scheduler notices within about 20 s. If a worker
# returns, the scheduler notices within 2 s; gRPC's own pause between attempts would grow to two minutes.
OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # so each new channel opens a connection of its own
)
TOKENIZER_FILES = frozenset(
    (
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "config_sentence_transformers.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    )
)
MAX_TOKENIZER_BYTES = 256 << 20
ADAPTER_SECONDS = 300.0
"""Time limit in seconds for sending an adapter: gigabytes over a slow network."""
_PORT = "--workers names the workers' --listen, which has port 50052 unless told otherwise"
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)


T = TypeVar("T")

_WRITE_FAILED = "Internal error from Core"
"""gRPC's message for a write that fails because the stream ends."""
END_SECONDS = 1.0
"""Seconds to wait for a stream's status after a failed write. gRPC delivers the status after the answers that are still
on their way.
"""


LONG_ENCODING_NS = 1_000_000
"""Nanoseconds of encoding a step. A step that takes longer to encode is written in a later turn of the event loop.
Writing a step takes half as long as encoding the step.
"""


class WorkerError(Exception):
    """The worker cannot be used. The exception's text is the reason."""

    blames_requests = True
    """Whether a request in flight may have crashed the worker."""


class UnreachableError(WorkerError):
    """No worker answers at the address, or the worker is not ready."""


class DrainedError(WorkerError):
    """The session ended because the worker shuts down or was drained."""

    blames_requests = False


class AdapterRefusedError(WorkerError):
    """The worker cannot use an adapter. The exception's text is the reason."""

    blames_requests = False


class AdapterFailedError(WorkerError):
    """The worker could not load an adapter at this time; a later attempt may succeed. A retry may succeed."""

    blames_requests = False


class AdapterCountError(WorkerError):
    """The worker's adapters differ from the scheduler's record."""

    blames_requests = False


class FencedError(WorkerError):
    """The worker refused a step that is out of order, or the worker has a session with a newer epoch."""

    blames_requests = False


class SupersededError(WorkerError):
    """Another scheduler has a session with the worker."""


class Session:
    """The Execute stream of one session: steps are sent, and their answers arrive in the same order. `split` records
    the times of each step.

    Sending and receiving raise WorkerError if the stream breaks or ends, or if an answer is invalid. If the worker or
    another scheduler ended the stream in an orderly way, sending and receiving raise DrainedError or FencedError.
    """

    def __init__(
        self, call: "grpc.aio.StreamStreamCall[pb.SchedulerOutput, pb.ModelOutput]", epoch: int, split: StepSplit
    ) -> None:
        self.epoch = epoch
        self.last_answer = pb.ModelOutput()  # the last answer in serialized form, for a recording
        self._call = call
        self._answers = aiter(call)  # Also yields answers that arrived before a failed write; `read` would drop them.
        self._status: tuple[grpc.StatusCode, str | None]  # Unset until the call has ended.
        call.add_done_callback(self._ended)
        self._split = split
        self._round_trips = RoundTrips(split)

    @property
    def waiting_since(self) -> float | None:
        """The time since which the scheduler waits for the answer to the oldest step in flight: the step was sent, or
        the previous answer arrived, whichever is later.

        The value is in seconds of `time.perf_counter`, or None if no step is in flight.
        """
        since = self._round_trips.waiting_since
        return None if since is None else since / 1e9

    async def send(self, output: SchedulerOutput) -> None:
        """Send a step. The worker runs the step after all steps that were sent before."""
        began = perf_counter_ns()
        message = encode_scheduler_output(output, self.epoch)
        encoded = perf_counter_ns()
        self._split.encode += encoded - began
        if encoded - began > LONG_ENCODING_NS:
            await asyncio.sleep(0)
        self._round_trips.sent(encoded)
        try:
            await self._call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the stream has ended
            raise await self._end() from None

    async def receive(self) -> ModelOutput:
        """Wait for the answer to the oldest step in flight."""
        try:
            answer = await anext(self._answers)
        except (StopAsyncIteration, grpc.aio.AioRpcError):
            raise await self._end() from None
        if answer is None:  # gRPC's value for a message that cannot be parsed
            raise WorkerError("the worker sent something that is no ModelOutput")
        if answer.epoch != self.epoch:
            raise WorkerError(f"the worker answered for epoch {answer.epoch} in the session of epoch {self.epoch}")
        if not self._round_trips.num_in_flight:
            raise WorkerError(f"the worker answered step {answer.step_id}, and none was in flight")
        self._round_trips.answered(came := perf_counter_ns(), answer.timing)
        self.last_answer = answer
        try:
            output = decode_model_output(answer)
        except ValueError as error:
            raise WorkerError(str(error)) from error
        self._split.decode += perf_counter_ns() - came
        return output

    def _ended(self, call: grpc.aio.Call) -> None:
        """Store the stream's status at once. gRPC overwrites the status if a write fails in this turn of the event loop
        or later.
        """
        self._status = _at_once(call.code()), _at_once(call.details())

    async def _end(self) -> WorkerError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while self._status[1] == _WRITE_FAILED:  # the write failed, and the stream's status has not arrived yet
                    await asyncio.sleep(0.001)
                    self._ended(self._call)
        code, details = self._status
        if details == _WRITE_FAILED:
            return WorkerError("the session broke while a step was sent")
        reason = details or "no reason given"
        if code is grpc.StatusCode.ABORTED:
            return DrainedError(f"the worker ended the session: {reason}")
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return FencedError(f"the worker refused the session: {reason}")
        return WorkerError(f"the session broke: {code.name}: {reason}")

    def close(self) -> None:
        self._call.cancel()


class WorkerClient:
    """A channel to one worker. Create a client inside the event loop that uses it.

    Every method that calls the worker raises UnreachableError if the worker does not answer.
    """

    def __init__(self, address: str, tls: TlsFolder | None = None, identity: str = "") -> None:
        """With `tls`, the worker's certificate must contain the name `identity`. If `identity` is empty, the
        certificate must contain the host of the address.
        """
        self.address = address
        self.epoch = 0
        """Epoch of the current session, or of the next session. Calls that load or unload adapters contain this epoch.
        """
        self._direction = Direction(address, tls is not None, "--worker-tls", _PORT)
        self._tls = tls
        self._identity = identity
        self._connect()

    def _connect(self) -> None:
        self._channel = secure_channel(self.address, self._tls, OPTIONS, identity=self._identity)
        self._stub = WorkerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def reconnect(self) -> None:
        """Make the next call open a new connection. Used when the existing connection may be dead although it looks
        open.
        """
        await self._channel.close()
        self._connect()

    async def get_info(self) -> WorkerInfo:
        try:
            return decode_worker_info(await self._stub.GetWorkerInfo(worker_pb.GetWorkerInfoRequest(), timeout=5))
        except grpc.aio.AioRpcError as error:
            raise await self._unreachable(error) from None

    async def fetch_tokenizer(self) -> dict[str, bytes]:
        """Fetch the worker's tokenizer files. Returns the contents of the files by file name. Raises WorkerError if the
        worker sends a file that is not a tokenizer file.
        """
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
        """Send an adapter.

        Raises AdapterRefusedError if the worker cannot use the adapter. Raises AdapterCountError if the worker has no
        place for the adapter. The method also raises AdapterFailedError and the errors of `pieces`.
        """
        failures: list[Exception] = []

        async def sent() -> AsyncIterator[worker_pb.TakeAdapterRequest]:
            epoch = self.epoch  # only the first piece of the adapter contains the epoch
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
        """Have the worker remove an adapter. Raises AdapterCountError."""
        try:
            request = worker_pb.DropAdapterRequest(fingerprint=fingerprint, epoch=self.epoch)
            await self._stub.DropAdapter(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            raise AdapterCountError(
                f"the worker does not forget an adapter: {await self._unreachable(error)}"
            ) from None

    async def is_serving(self, timeout: float) -> bool:
        """Whether the worker reports SERVING. A worker without a health service counts as serving."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return True
            raise await self._unreachable(error) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def watch_serving(self) -> AsyncIterator[bool]:
        """Yield the worker's health now and after each change, until the connection breaks."""
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


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, and return the coroutine's result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("the coroutine waits for something")
