"""A WorkerService between a scheduler and a real worker, which changes their messages.

Steps go through `on_step`, answers through `on_answer`; each returns the message to pass on. Only a test's own changes
are wrong.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_common.serving.server import OPTIONS

SERVICE = worker_pb.DESCRIPTOR.services_by_name["WorkerService"].full_name


class Meddler:
    """Passes every message on, unless a test changes `on_step` or `on_answer`."""

    def __init__(self, worker: str) -> None:
        self.address = ""
        self.num_sessions = 0
        self.num_lies = 0
        """Messages that were changed or dropped."""
        self.session_errors: list[tuple[grpc.StatusCode, str]] = []
        """The statuses with which the worker ended sessions."""
        self.on_step: Callable[[pb.SchedulerOutput], pb.SchedulerOutput | None] = lambda step: step
        """Returns None to drop the step."""
        self.on_answer: Callable[[pb.ModelOutput], pb.ModelOutput | bytes] = lambda answer: answer
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        self._changed = asyncio.Condition()
        self._worker = worker
        self._stub: WorkerServiceStub | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Meddler"]:
        server = grpc.aio.server(options=OPTIONS)  # those of a worker: pings are welcome
        handlers = {
            "GetWorkerInfo": grpc.unary_unary_rpc_method_handler(
                self._get_info,
                worker_pb.GetWorkerInfoRequest.FromString,
                worker_pb.GetWorkerInfoResponse.SerializeToString,
            ),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                self._get_tokenizer,
                worker_pb.GetTokenizerRequest.FromString,
                worker_pb.GetTokenizerResponse.SerializeToString,
            ),
            "Execute": grpc.stream_stream_rpc_method_handler(
                self._execute, pb.SchedulerOutput.FromString, lambda data: data
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        async with grpc.aio.insecure_channel(self._worker) as channel:
            self._stub = WorkerServiceStub(channel)
            await server.start()
            try:
                yield self
            finally:
                await server.stop(None)

    async def until(self, is_reached: Callable[[], bool], timeout: float = 60.0) -> None:
        """Return when something has changed so that `is_reached`."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(is_reached)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _get_info(self, request: Any, context: Any) -> Any:
        assert self._stub is not None
        try:
            return await self._stub.GetWorkerInfo(request)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())

    async def _get_tokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        assert self._stub is not None
        async for piece in self._stub.GetTokenizer(request):
            yield piece

    async def _execute(self, requests: AsyncIterator[pb.SchedulerOutput], context: Any) -> AsyncIterator[bytes]:
        assert self._stub is not None
        self.num_sessions += 1
        await self._notify()
        call = self._stub.Execute(self._steps(requests))
        try:
            async for answer in call:
                if self.before_answer is not None:
                    await self.before_answer()
                passed_on = self.on_answer(answer)
                if passed_on is not answer:
                    self.num_lies += 1
                    await self._notify()
                yield passed_on if isinstance(passed_on, bytes) else passed_on.SerializeToString()
        except grpc.aio.AioRpcError as error:
            self.session_errors.append((error.code(), str(error.details())))
            await self._notify()
            await context.abort(error.code(), error.details())
        finally:
            call.cancel()

    async def _steps(self, requests: AsyncIterator[pb.SchedulerOutput]) -> AsyncIterator[pb.SchedulerOutput]:
        async for step in requests:
            passed_on = self.on_step(step)
            if passed_on is not step:
                self.num_lies += 1
                await self._notify()
            if passed_on is not None:
                yield passed_on
