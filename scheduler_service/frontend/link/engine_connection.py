"""The stream between a front end and the engine: events, questions with their answers, and the engine's messages."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import structlog

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1.engine_service_pb2_grpc import EngineServiceStub
from pagewire_common.calls.errors import RequestError
from pagewire_common.connection.channel import open_channel
from scheduler_service.wire.messages import Pace

log = structlog.get_logger()

# Buffers are small, so that the engine notices when this front end is slow.
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
)
MAX_BYTES = 1 << 20
"""Bytes of a message with several events; the engine parses them in 1 ms."""
CODES = {code.value[0]: code for code in grpc.StatusCode}
GONE = RequestError(grpc.StatusCode.UNAVAILABLE, "the engine is gone; resume the request when the server is back")


class EngineConnection:
    def __init__(self, target: str) -> None:
        self._channel = open_channel(target, None, OPTIONS)
        self._numbers = itertools.count(1)
        self._questions: dict[int, deque[asyncio.Future[pb.Answer]]] = {}  # by call, oldest first
        self._events: list[pb.FrontendEvent] = []
        self._has_events = asyncio.Event()
        self.heard_at = time.monotonic()
        """Monotonic time of the engine's last message: the engine asks for statistics every few seconds."""
        self.end: RequestError | None = None
        """The error of all calls after the end of the connection."""

    def new_number(self) -> int:
        return next(self._numbers)

    def say(self, call: int, **event: Any) -> None:
        """Send the engine an event. The keyword is the event's field in `FrontendEvent`."""
        self._events.append(pb.FrontendEvent(call=call, **event))
        self._has_events.set()

    def question(self, call: int, **event: Any) -> asyncio.Future[pb.Answer]:
        """Send the engine an event. Result: the answer or, if the connection is closed, its error as an answer."""
        future: asyncio.Future[pb.Answer] = asyncio.get_running_loop().create_future()
        if self.end is not None:
            future.set_result(_refusal(self.end))
        else:
            self._questions.setdefault(call, deque()).append(future)
            self.say(call, **event)
        return future

    async def ask(self, call: int, **event: Any) -> pb.Answer:
        """Send the engine an event and wait for the answer. Raises RequestError."""
        return await accepted(self.question(call, **event))

    def answer(self, call: int, answer: pb.Answer) -> None:
        if (questions := self._questions.get(call)) is None:
            return
        future = questions.popleft()
        if not questions:
            del self._questions[call]
        future.set_result(answer)

    async def messages(self) -> AsyncGenerator[pb.AttachResponse, None]:
        call = EngineServiceStub(self._channel).Attach(self._said())
        try:
            async for message in call:
                self.heard_at = time.monotonic()
                yield message
            log.error("the engine is gone", reason="it ended the connection")
        except grpc.aio.AioRpcError as error:
            log.error("the engine is gone", reason=error.details())
        finally:
            call.cancel()

    def finish(self) -> RequestError:
        """Fail all unanswered questions, because the connection is over. Returns the error for later calls."""
        end = self.end = self.end or GONE
        for number, questions in list(self._questions.items()):
            for _ in range(len(questions)):
                self.answer(number, _refusal(end))
        return end

    async def close(self) -> None:
        await self._channel.close()

    async def _said(self) -> AsyncIterator[pb.AttachRequest]:
        pace = Pace()
        while True:
            await self._has_events.wait()
            await pace.wait()
            num_bytes = num_events = 0
            for event in self._events:
                num_bytes += event.ByteSize()
                if num_bytes > MAX_BYTES and num_events:
                    break
                num_events += 1
            message = pb.AttachRequest(events=self._events[:num_events])
            del self._events[:num_events]
            if not self._events:
                self._has_events.clear()
            yield message


async def accepted(answer: asyncio.Future[pb.Answer]) -> pb.Answer:
    """Wait for an answer, and raise it if it is an error. Cancelling the caller does not cancel `answer`."""
    found = await asyncio.shield(answer)
    if found.code:
        raise RequestError(CODES[found.code], found.message)
    return found


def _refusal(error: RequestError) -> pb.Answer:
    return pb.Answer(code=error.code.value[0], message=str(error))
