"""A front end's end of the wire to the engine: what calls ask of it, and what it tells of their requests."""

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import structlog
from opentelemetry.trace import Tracer

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1.engine_service_pb2_grpc import EngineServiceStub
from pagewire_common.calls.errors import RequestError, RequestLimits
from pagewire_common.connection.channel import open_channel
from pagewire_common.processes.temporary import TemporaryFolder
from scheduler_service.access.keys import Keyring
from scheduler_service.frontend.link.patience import patience
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.gained import decode_gained
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.turns import Turns
from scheduler_service.frontend.text.tokenization import without_panic
from scheduler_service.statistics.counts import CountsByTenant
from scheduler_service.wire.pace import Pace

log = structlog.get_logger()

# What the engine has sent and we have not read is kept small, so that the engine knows when we cannot keep up.
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
)
MOST_BYTES = 1 << 20
"""Of one message to the engine, if it is not a single event: 1 ms to parse."""

MIN_REQUEST_BYTES = 1 << 20
MOST_SOUND_BYTES = 16 << 20
BYTES_PER_TOKEN = 12
"""Of the largest prompt. A token id takes at most 3 bytes of a message, a token of text 4 or 5, and of code up to 10. A
MiB takes 3 to 7 ms to parse.
"""

WAITING_SHARE = 4
MIN_WAITING = 16 << 20
WAITING_SOUNDS = 12
"""Four of the largest: each is counted three times."""
"""Calls that wait to be admitted may take a quarter of what unread output may, or so many bytes, besides: the engine
answers in milliseconds."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}
SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
GONE = RequestError(grpc.StatusCode.UNAVAILABLE, "the engine is gone; resume the request when the server is back")
_NO_TOKENIZER = "the model's tokenizer cannot be loaded; the server's log and GetClusterState say why"
MOST_REASON = 300
"""Characters of why the model cannot be loaded."""


class EngineLink:
    """One session with the engine. Create it inside the running event loop; `run` keeps it up until either side ends.

    `welcome` and `model` are resolved by what the engine tells first.
    """

    def __init__(self, target: str, tracer: Tracer | None = None) -> None:
        self.channel = open_channel(target, None, OPTIONS)
        loop = asyncio.get_running_loop()
        self.welcome: asyncio.Future[pb.Welcome] = loop.create_future()
        self._model: asyncio.Future[ServedModel] = loop.create_future()
        self.tracer = tracer
        """For spans of requests; None where there are none."""
        self.keyring: Keyring | None = None
        """The API keys that calls need; None where they need none."""
        self.lora_names: tuple[str, ...] = ()
        """The adapters that requests can name, in alphabetical order."""
        self.serving = False
        self.serving_changed = asyncio.Event()
        self.counts = CountsByTenant()
        self.turns = Turns()
        self.unread = UnreadOutput(0)
        self.requests: dict[int, RequestState] = {}  # by the numbers of their calls
        self._by_output: dict[int, RequestState] = {}  # by the numbers of their outputs
        self._answers: dict[int, asyncio.Future[pb.Answer]] = {}  # by the numbers of the calls that wait for them
        self._numbers = itertools.count(1)
        self._output_numbers = 1
        self._events: list[pb.FrontendEvent] = []
        self._has_events = asyncio.Event()
        self._files: dict[str, bytearray] = {}
        self._loading: asyncio.Task[None] | None = None
        self._waiting_bytes = 0
        self.heard_at = time.monotonic()
        """When the engine said something last; it asks for statistics every few seconds."""
        self._end: RequestError | None = None  # what calls end with once the session is over

    # ---- for servicers

    async def wait_for_model(self) -> ServedModel:
        """The served model, however long it takes. Raises what loading it raised."""
        return await asyncio.shield(self._model)

    async def model(self) -> ServedModel:
        """The served model; raises UNAVAILABLE when no worker tells of one in time, or it cannot be loaded."""
        if self._has_model:
            return self._model.result()
        timeout = min(self.welcome.result().no_worker_timeout, patience.get())
        try:
            return await asyncio.wait_for(self.wait_for_model(), timeout)
        except TimeoutError:
            await self.ask(self.new_number(), unserved=pb.Unserved(seconds=timeout))  # raises UNAVAILABLE, with reasons
            raise AssertionError from None
        except Exception:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, _NO_TOKENIZER) from None

    @property
    def _has_model(self) -> bool:
        return self._model.done() and self._model.exception() is None

    @property
    def stall_timeout(self) -> float:
        """Seconds that a client may leave a message unread."""
        return self.welcome.result().stall_timeout

    @property
    def request_limits(self) -> RequestLimits:
        """Of a request's message: room for the model's longest prompts and no more, as parsing blocks the loop."""
        if not self._has_model:
            return RequestLimits(MIN_REQUEST_BYTES, will_grow="until the served model is known; try again later")
        model = self._model.result()
        longest = (model.context_length + model.max_encoder_len) * BYTES_PER_TOKEN
        return RequestLimits(max(MIN_REQUEST_BYTES, longest), self.max_sound_bytes)

    @property
    def max_sound_bytes(self) -> int:
        """What a message may have besides, of a sound, which is not parsed."""
        return MOST_SOUND_BYTES if self._has_model and self._model.result().feature_bytes else 0

    @contextlib.contextmanager
    def waiting(self, num_bytes: int) -> Iterator[None]:
        """Count memory of a call that the engine has not counted yet, because it has not answered.

        Raises RESOURCE_EXHAUSTED, but not for the only one, when there is no room for it: the engine is slow, or gone.
        """
        if self._waiting_bytes and self._waiting_bytes + num_bytes > max(
            MIN_WAITING, self.unread.most // WAITING_SHARE, WAITING_SOUNDS * self.max_sound_bytes
        ):
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._waiting_bytes += num_bytes
        try:
            yield
        finally:
            self._waiting_bytes -= num_bytes

    def new_number(self) -> int:
        """The number of a call that begins."""
        return next(self._numbers)

    async def abort(self, key: str) -> bool:
        """End a request of any front end. Returns whether there is one."""
        answer = await self.ask(next(self._numbers), abort=pb.AbortRequestByKey(key=key))
        return answer.found

    # ---- the session

    async def run(self) -> bool:
        """Take in what the engine tells, until it says goodbye or is gone; then every request that is left fails.

        Returns whether it said goodbye.
        """
        call = EngineServiceStub(self.channel).Attach(self._said())
        try:
            async for message in call:
                self.heard_at = time.monotonic()
                self._take(message, time.monotonic())
                if self._end is not None:
                    return True
            log.error("the engine is gone", reason="it ended the session")
        except grpc.aio.AioRpcError as error:
            log.error("the engine is gone", reason=error.details())
        finally:
            call.cancel()
            if self._loading is not None:
                self._loading.cancel()
            end = self._end = self._end or GONE
            for state in self.requests.values():
                state.stream.fail(end)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_result(pb.Answer(code=end.code.value[0], message=str(end)))
        return False

    async def close(self) -> None:
        await self.channel.close()

    def say(self, call: int, **event: Any) -> None:
        """Tell the engine something, by its name among the fields of `FrontendEvent`."""
        self._events.append(pb.FrontendEvent(call=call, **event))
        self._has_events.set()

    async def ask(self, call: int, **event: Any) -> pb.Answer:
        """Tell the engine something that it answers. Raises the RequestError that it answers with.

        When the session is over, UNAVAILABLE is raised at once.
        """
        if self._end is not None:
            raise RequestError(self._end.code, str(self._end))
        self._answers[call] = future = asyncio.get_running_loop().create_future()
        try:
            self.say(call, **event)
            answer: pb.Answer = await future
        finally:
            del self._answers[call]
        if answer.code:
            raise RequestError(_CODES[answer.code], answer.message)
        return answer

    async def _said(self) -> AsyncIterator[pb.AttachRequest]:
        pace = Pace()
        while True:
            await self._has_events.wait()
            await pace.wait()
            num_bytes = num_events = 0
            for event in self._events:
                num_bytes += event.ByteSize()
                if num_bytes > MOST_BYTES and num_events:
                    break
                num_events += 1
            message = pb.AttachRequest(events=self._events[:num_events])
            del self._events[:num_events]
            if not self._events:
                self._has_events.clear()
            yield message

    # ---- what the engine tells

    def _take(self, message: pb.AttachResponse, now: float) -> None:
        outputs, token_ids = list(message.outputs), list(message.token_ids)
        row = 0
        for event in message.events:
            if event.row > row:
                self._gain_tokens(outputs[row : event.row], token_ids[row : event.row], now)
                row = event.row
            state = self.requests.get(event.call)
            try:
                self._event(event, state, now)
            except Exception as error:  # one request's text must not cost the others their tokens
                if state is None:
                    raise
                self._fail(event.call, state, error)
        self._gain_tokens(outputs[row:], token_ids[row:], now)
        if self.unread.is_too_much:
            self._cut_largest()

    def _gain_tokens(self, outputs: Sequence[int], token_ids: Sequence[int], now: float) -> None:
        by_output = self._by_output
        for output, token_id in zip(outputs, token_ids, strict=True):
            state = by_output.get(output)
            if state is None:  # closed, and the engine is being told
                continue
            index = output - state.first_output
            try:
                if state.gain_token(index, token_id, now):
                    self.say(state.call, stop_output=pb.StopOutput(index=index))
            except Exception as error:
                self._fail(state.call, state, error)

    def _event(self, event: pb.EngineEvent, state: RequestState | None, now: float) -> None:
        kind = event.WhichOneof("event")
        if kind == "answer":
            future = self._answers.get(event.call)
            if future is not None and not future.done():
                future.set_result(event.answer)
        elif event.call:
            if state is not None:
                self._request_event(kind, event, state, now)
        elif kind == "welcome":
            self.unread.most = event.welcome.unread_bytes
            if event.welcome.HasField("keys"):
                self.keyring = Keyring.decode(event.welcome.keys)
            self.welcome.set_result(event.welcome)
        elif kind == "model_file":
            self._files.setdefault(event.model_file.name, bytearray()).extend(event.model_file.data)
        elif kind == "model":
            self._loading = asyncio.create_task(self._load(event.model))
        elif kind == "health":
            self.serving = event.health.serving
            self.serving_changed.set()
        elif kind == "statistics_wanted":
            self.say(0, statistics=self.counts.encode())
        elif kind == "keys":
            self.keyring = Keyring.decode(event.keys)
        elif kind == "adapters":
            self.lora_names = tuple(event.adapters.names)
        elif kind == "goodbye":
            self._end = SHUTTING_DOWN

    def _request_event(self, kind: str | None, event: pb.EngineEvent, state: RequestState, now: float) -> None:
        if kind == "standing":
            state.stands(event.standing)
        elif kind == "gained":
            if state.gain(decode_gained(event.gained), now):
                self.say(event.call, stop_output=pb.StopOutput(index=event.gained.index))
        elif kind == "hypotheses":
            state.gain_hypotheses(event.hypotheses.hypotheses, now)
        elif kind == "aborted":
            state.abort()
        elif kind == "failed":
            error = RequestError(_CODES[event.failed.code], event.failed.message)
            if event.failed.at_once:
                state.stream.cut(error)
            else:
                state.stream.fail(error)

    def _fail(self, call: int, state: RequestState, error: Exception) -> None:
        log.error("request failed", request_id=state.request.request_id, exc_info=error)
        state.stream.fail(RequestError(grpc.StatusCode.INTERNAL, "the request could not be served"))
        self.forget(call)

    def _cut_largest(self) -> None:
        """End requests for the output that their clients have not read, until the rest may stay."""
        for state in sorted(self.requests.values(), key=lambda state: -state.stream.num_unread):
            if not self.unread.is_too_much:
                return
            reason = (
                f"this request has {state.stream.num_unread / 2**20:.1f} MiB of output that its client has not read, "
                "or that waits until the best outputs are known: the most of all requests, which together may have "
                f"{self.unread.most / 2**20:.1f} MiB (a part of --request-memory); read faster, or ask for fewer "
                "log-probabilities or outputs"
            )
            self.forget(state.call)
            state.stream.cut(RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))

    async def _load(self, limits: pb.ModelLimits) -> None:
        def load() -> ServedModel:
            with TemporaryFolder("tokenizer") as folder:
                for name, data in self._files.items():
                    (folder / name).write_bytes(data)
                return ServedModel.load(limits, folder)

        try:
            self._model.set_result(await asyncio.to_thread(without_panic, load))
        except Exception as error:
            self._model.set_exception(error)
            self.say(0, load_failed=pb.LoadFailed(reason=_reason(error)))
        self._files.clear()

    # ---- for calls

    def register(self, call: int, state: RequestState) -> None:
        """Have what the engine tells of this call reach its request; gives its outputs their numbers."""
        state.call, state.first_output = call, self._output_numbers
        self._output_numbers += state.request.sampling.n
        self.requests[call] = state
        for index in range(state.request.sampling.n):
            self._by_output[state.first_output + index] = state

    def forget(self, call: int) -> None:
        """Pass over what the engine tells of this call from now on."""
        if (state := self.requests.pop(call, None)) is not None:
            for index in range(state.request.sampling.n):
                del self._by_output[state.first_output + index]


def _reason(error: Exception) -> str:
    """Of an error in loading, in one line, without the folder that the files were in."""
    text = re.sub(r"[^\s'\"]*/pagewire-[^/\s'\"]*/?", "", str(error))
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split()) or type(error).__name__
    return line if len(line) <= MOST_REASON else f"{line[:MOST_REASON]}…"
