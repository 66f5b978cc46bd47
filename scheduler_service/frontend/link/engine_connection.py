"""The stream between a front end and the engine: events, questions with their answers, and the engine's messages."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

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
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
MAX_BYTES = 1 << 20
"""Bytes of a message with several events; the engine parses them in 1 ms."""
CODES = {code.value[0]: code for code in grpc.StatusCode}
GONE = RequestError(grpc.StatusCode.UNAVAILABLE, "the engine is gone; resume the request when the server is back")


class _Question(NamedTuple):
    event: pb.FrontendEvent
    answer: asyncio.Future[pb.Answer]
    restores: bool


class EngineConnection:
    """Between a lost engine and the `release` for the next one, questions are held, and other events of calls are
    dropped: what a lost engine knew of a call is told anew.
    """

    def __init__(self, target: str) -> None:
        self._channel = open_channel(target, None, OPTIONS)
        self._numbers = itertools.count(1)
        self._questions: dict[int, deque[_Question]] = {}  # by call, oldest first
        self._held: dict[int, deque[_Question]] = {}  # for the next engine
        self._left: set[int] = set()  # calls that have ended before the answers to their questions
        self._restored: set[int] = set()  # calls that the next engine knows, before `release`
        self._events: list[pb.FrontendEvent] = []
        self._has_events = asyncio.Event()
        self._num_lost = 0  # engines
        self.is_held = False
        self.heard_at = time.monotonic()
        """Monotonic time of the engine's last message: the engine asks for statistics every few seconds."""
        self.end: RequestError | None = None
        """The error of all calls after the end of the connection."""

    def new_number(self) -> int:
        return next(self._numbers)

    def say(self, call: int, **event: Any) -> None:
        """Send the engine an event. The keyword is the event's field in `FrontendEvent`."""
        if not call or not self.is_held or call in self._restored:
            self._send(pb.FrontendEvent(call=call, **event))

    def question(self, call: int, *, restores: bool = False, **event: Any) -> asyncio.Future[pb.Answer]:
        """Send the engine an event. Result: the answer or, if the connection is closed, its error as an answer.

        `restores`: the event tells the next engine what the lost one knew, so it is not held.
        """
        future: asyncio.Future[pb.Answer] = asyncio.get_running_loop().create_future()
        if self.end is not None:
            future.set_result(_refusal(self.end))
            return future
        asked = _Question(pb.FrontendEvent(call=call, **event), future, restores)
        if self.is_held and "close" in event and call not in self._restored:
            future.set_result(pb.Answer())  # the next engine does not know the call
        elif self.is_held and not restores:
            self._held.setdefault(call, deque()).append(asked)
        else:
            if restores:
                self._restored.add(call)
            self._ask(asked)
        return future

    async def ask(self, call: int, **event: Any) -> pb.Answer:
        """Send the engine an event and wait for the answer. Raises RequestError."""
        try:
            return await accepted(self.question(call, **event))
        except asyncio.CancelledError:
            self.leave(call)
            raise

    def leave(self, call: int) -> None:
        """The call has ended, so the next engine is not asked its questions."""
        for asked in self._held.pop(call, ()):
            asked.answer.set_result(pb.Answer())
        if call in self._questions:
            self._left.add(call)

    def refuse(self, call: int, error: RequestError) -> None:
        """Answer a call's held questions with `error`."""
        for asked in self._held.pop(call, ()):
            asked.answer.set_result(_refusal(error))

    def answer(self, call: int, answer: pb.Answer) -> None:
        if (questions := self._questions.get(call)) is None:
            return
        asked = questions.popleft()
        if not questions:
            del self._questions[call]
            self._left.discard(call)
        asked.answer.set_result(answer)

    async def messages(self) -> AsyncGenerator[pb.AttachResponse, None]:
        """Wait for an engine, attach, and yield its messages until it is lost."""
        call = EngineServiceStub(self._channel).Attach(self._said(self._num_lost), wait_for_ready=True)
        try:
            async for message in call:
                self.heard_at = time.monotonic()
                yield message
            log.error("the engine is gone", reason="it ended the connection")
        except grpc.aio.AioRpcError as error:
            log.error("the engine is gone", reason=error.details())
        finally:
            call.cancel()

    def hold(self) -> None:
        """Hold the unanswered questions for the next engine."""
        self.is_held = True
        self._restored.clear()
        self._events.clear()
        self._num_lost += 1
        self._has_events.set()  # ends `_said` of the lost engine, which gRPC leaves waiting
        self._has_events.clear()
        for call, questions in self._questions.items():
            kept = deque[_Question]()
            for asked in questions:
                if call in self._left or asked.event.HasField("close"):
                    asked.answer.set_result(pb.Answer())  # the call is lost with the engine
                elif not asked.restores:
                    kept.append(asked)
            if kept or call in self._held:
                self._held[call] = kept + self._held.get(call, deque())
        self._questions.clear()
        self._left.clear()

    def release(self) -> None:
        """Ask the engine the held questions."""
        self.is_held = False
        self._restored.clear()
        held, self._held = self._held, {}
        for questions in held.values():
            for asked in questions:
                self._ask(asked)

    def finish(self) -> RequestError:
        """Fail all unanswered questions, because the connection is over. Returns the error for later calls."""
        end = self.end = self.end or GONE
        for questions in (*self._questions.values(), *self._held.values()):
            for asked in questions:
                asked.answer.set_result(_refusal(end))
        self._questions.clear()
        self._held.clear()
        return end

    def _ask(self, asked: _Question) -> None:
        self._questions.setdefault(asked.event.call, deque()).append(asked)
        self._send(asked.event)

    def _send(self, event: pb.FrontendEvent) -> None:
        self._events.append(event)
        self._has_events.set()

    async def close(self) -> None:
        await self._channel.close()

    async def _said(self, num_lost: int) -> AsyncIterator[pb.AttachRequest]:
        """The messages to the engine that comes after `num_lost` others."""
        pace = Pace()
        while True:
            await self._has_events.wait()
            await pace.wait()
            if num_lost != self._num_lost:
                return
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
