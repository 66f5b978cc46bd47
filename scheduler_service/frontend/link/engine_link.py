"""A front end's link to the engine: the requests in flight, the served model, and settings.

A front end checks a request while the engine decides whether to admit it. If the engine refuses the request, the check
was wasted. So for some seconds after a refusal, requests of the same API key are checked only after their admission.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import grpc
import structlog
from opentelemetry.trace import Tracer

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.calls.request_limits import RequestLimits
from scheduler_service.access.caller import caller
from scheduler_service.access.keys import Keyring
from scheduler_service.access.refusals import Refusals
from scheduler_service.frontend.link.engine_connection import GONE, EngineConnection
from scheduler_service.frontend.link.feed import Feed
from scheduler_service.frontend.link.model_loading import ModelLoading
from scheduler_service.frontend.link.request_registry import RequestRegistry
from scheduler_service.frontend.link.stored_texts import StoredTexts
from scheduler_service.frontend.model import ServedModel

log = structlog.get_logger()

SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
_NO_TOKENIZER = "the model's tokenizer cannot be loaded; the server's log and GetClusterState say why"
_NO_ENGINE = "the server's engine restarts, and took no requests"
MIN_REQUEST_BYTES = 1 << 20
MAX_OPAQUE_BYTES = 16 << 20
"""Largest bytes of a request's sound, prompt_embeds or images, which are not parsed."""
BYTES_PER_TOKEN = 12
"""Message bytes allowed for each token of the longest prompt. A token id takes at most 3 bytes; a token of prose 4 to
5, of program code up to 10. Parsing takes 3 to 7 ms a MiB.
"""
UNREAD_SHARE = 4
MIN_BYTES = 16 << 20
"""Limit on the bytes of unanswered admissions, or a quarter of the limit on unread output if the quarter is larger."""
NUM_OPAQUE = 12
"""Limit on unanswered admissions, in sounds of the largest size. A sound is counted three times, so four fit."""
ENGINE_SECONDS = 30.0
"""Seconds to wait for the next engine, or --no-worker-timeout if that is longer."""
WAIT_SECONDS = 10.0
"""Seconds after a refusal in which the calls of the API key wait for their answers."""
PATIENCE_HEADER = "pagewire-no-worker-timeout"
patience: ContextVar[float] = ContextVar("patience", default=math.inf)
"""Seconds that the current call may wait for a worker, if below the server's --no-worker-timeout."""


def request_limits(model: ServedModel | None) -> RequestLimits:
    """Limits on a message: the model's longest prompt fits, and parsing does not block the event loop for long."""
    if model is None:
        return RequestLimits(MIN_REQUEST_BYTES, will_grow="until the served model is known; try again later")
    longest = (model.context_length + model.max_encoder_len) * BYTES_PER_TOKEN
    return RequestLimits(max(MIN_REQUEST_BYTES, longest), _max_opaque_bytes(model))


def _max_opaque_bytes(model: ServedModel | None) -> int:
    if model is None:
        return 0
    return MAX_OPAQUE_BYTES if model.feature_bytes or model.prompt_embeds_size or model.encoder_cache_size else 0


def note_patience(details: grpc.HandlerCallDetails) -> None:
    """Set `patience` from a call's metadata. Raises INVALID_ARGUMENT for a malformed value."""
    for name, value in details.invocation_metadata or ():
        if name != PATIENCE_HEADER:
            continue
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            reason = f"metadata {PATIENCE_HEADER} is {str(value)[:40]!r}; it must be a number of seconds, 0 or more"
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, reason)
        patience.set(seconds)


class Admissions:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._refused_at: dict[str, float] = {}  # by the id of the API key

    def must_wait(self, api_key_id: str) -> bool:
        return time.monotonic() - self._refused_at.get(api_key_id, -math.inf) < WAIT_SECONDS

    def check_room(self, num_bytes: int, max_unread: int, model: ServedModel | None) -> None:
        """Raise RESOURCE_EXHAUSTED if the unanswered admissions and this call have too many bytes, unless this call is
        alone.

        `max_unread`: limit on the bytes of unread output.
        """
        limit = max(MIN_BYTES, max_unread // UNREAD_SHARE, NUM_OPAQUE * _max_opaque_bytes(model))
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            reason = "too many requests wait to be admitted; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def count(self, api_key_id: str, num_bytes: int, answer: asyncio.Future[pb.Answer]) -> None:
        self.num_bytes += num_bytes

        def answered(found: asyncio.Future[pb.Answer]) -> None:
            self.num_bytes -= num_bytes
            if found.result().code:
                self._refused_at[api_key_id] = time.monotonic()

        answer.add_done_callback(answered)


class OpenCall(Protocol):
    async def restore(self) -> None:
        """Tell the engine what a lost engine knew of this call."""


class EngineLink:
    """The link outlives an engine: requests in flight go on in the next one, with the tokens that they have."""

    def __init__(
        self, target: str, tracer: Tracer | None = None, response_template: Mapping[str, Any] | None = None
    ) -> None:
        self.connection = EngineConnection(target)
        self.requests = RequestRegistry(self.connection)
        self.loading = ModelLoading(self.connection, response_template)
        self.admissions = Admissions()
        self.stored = StoredTexts(self.connection)
        self.feed = Feed(self.connection)
        self.welcome: asyncio.Future[pb.Welcome] = asyncio.get_running_loop().create_future()
        self.tracer = tracer
        self.keyring: Keyring | None = None
        """None if calls need no API key."""
        self.refusals = Refusals()
        self.adapter_names: tuple[str, ...] = ()
        self.serving = self.fleet_serves = False
        self.serving_changed = asyncio.Event()
        self.open_calls: dict[int, OpenCall] = {}
        """The calls that the engine knows, by number; a call's parts follow it."""
        self._listening: pb.Listening | None = None
        self._patience = asyncio.timeout(None)  # for the next engine
        self._restoring: asyncio.Task[None] | None = None

    # ---- for servicers

    async def model(self) -> ServedModel:
        """Wait for the served model. Raises UNAVAILABLE if no worker describes it in time, or it cannot be loaded."""
        if (model := self.loading.model) is not None:
            return model
        timeout = min(self.welcome.result().no_worker_timeout, patience.get())
        try:
            return await asyncio.wait_for(self.loading.wait(), timeout)
        except TimeoutError:
            asking = self.connection.new_number()
            await self.connection.ask(asking, unserved=pb.Unserved(seconds=timeout))  # raises UNAVAILABLE, with reasons
            raise AssertionError from None
        except Exception:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, _NO_TOKENIZER) from None

    @property
    def stall_timeout(self) -> float:
        """Seconds that a client may leave a message unread before its stream ends."""
        return self.welcome.result().stall_timeout

    def check(self, details: grpc.HandlerCallDetails) -> None:
        """Find the caller's API key, and note the call's patience, before its request is read. Raises RequestError."""
        if self.keyring is not None:
            caller.set(key := self.keyring.authenticate(details.invocation_metadata))
            self.refusals.check(key, time.monotonic())
        note_patience(details)

    def request_limits(self) -> RequestLimits:
        return request_limits(self.loading.model)

    def admit(self, call: int, admit: pb.Admit, num_bytes: int) -> asyncio.Future[pb.Answer]:
        """Ask the engine to admit a call, which takes `num_bytes`. Raises RESOURCE_EXHAUSTED if too many bytes wait."""
        self.admissions.check_room(num_bytes, self.requests.unread.most, self.loading.model)
        answer = self.connection.question(call, admit=admit)
        self.admissions.count(admit.api_key_id, num_bytes, answer)
        if self.connection.is_held:
            seconds = min(self.welcome.result().no_worker_timeout, patience.get())
            error = RequestError(grpc.StatusCode.UNAVAILABLE, f"{_NO_ENGINE} for {seconds:g} s; try again later")
            waiting = asyncio.get_running_loop().call_later(seconds, self.connection.refuse, call, error)
            answer.add_done_callback(lambda _: waiting.cancel())
        return answer

    async def abort(self, key: str) -> bool:
        """End a request, possibly of another front end. Returns whether it existed."""
        number = self.connection.new_number()
        answer = await self.connection.ask(number, abort=pb.AbortRequestByKey(key=key))
        return answer.found

    async def metrics(self, authorization: str) -> bytes:
        """The engine's metrics in Prometheus' text format. Raises RequestError."""
        answer = await self.connection.ask(
            self.connection.new_number(), read_metrics=pb.ReadMetrics(authorization=authorization)
        )
        return answer.data

    async def administer(self, authorization: str, **command: Any) -> bytes:
        """Run an operator's command, whose field in `Administer` is the keyword. Returns the serialized response.
        Raises RequestError."""
        asked = pb.Administer(authorization=authorization, **command)
        return (await self.connection.ask(self.connection.new_number(), administer=asked)).data

    # ---- the engine's messages

    async def run(self) -> bool:
        """Process the messages of one engine after the other, then fail all requests.

        Ends when an engine has said goodbye, or no engine with the same model has come in time. Returns whether an
        engine said goodbye.
        """
        try:
            async with self._patience:
                while True:
                    async with contextlib.aclosing(self.connection.messages()) as messages:
                        async for message in messages:
                            self.take(message, time.monotonic())
                            if self.connection.end is not None:
                                return self.connection.end is SHUTTING_DOWN
                    self._lose()
        except TimeoutError:
            log.error("no engine with this model has come")
        finally:
            self._stop_restoring()
            self.feed.end_all()
            self.loading.cancel()
            self.requests.fail_all(self.connection.finish())
        return False

    def _lose(self) -> None:
        self._stop_restoring()
        self.feed.end_all()
        self.connection.hold()
        self.loading.forget_files()
        self.serving = False
        self.serving_changed.set()
        if self.welcome.done() and self._patience.when() is None:
            seconds = max(ENGINE_SECONDS, self.welcome.result().no_worker_timeout)
            self._patience.reschedule(asyncio.get_running_loop().time() + seconds)

    def _stop_restoring(self) -> None:
        if self._restoring is not None:
            self._restoring.cancel()
            self._restoring = None

    async def _restore(self) -> None:
        """Tell the engine of all open calls, then ask what was held."""
        for number in sorted(self.open_calls):
            if (call := self.open_calls.get(number)) is not None:  # not closed meanwhile
                await call.restore()
        self._restoring = None
        self.connection.release()
        self._patience.reschedule(None)
        log.info("requests go on in the next engine", requests=len(self.requests.by_call))

    def _begin_to_restore(self) -> None:
        if self.connection.is_held and self._restoring is None:
            self._restoring = asyncio.create_task(self._restore())

    def listens(self, address: str) -> None:
        """Tell this and each later engine where clients are served."""
        self._listening = pb.Listening(address=address, process_id=os.getpid())
        self.connection.say(0, listening=self._listening)

    def take(self, message: pb.AttachResponse, now: float) -> None:
        outputs, token_ids = list(message.outputs), list(message.token_ids)
        row = 0
        for event in message.events:
            if event.row > row:
                self.requests.gain_tokens(outputs[row : event.row], token_ids[row : event.row], now)
                row = event.row
            if event.HasField("answer"):
                self.connection.answer(event.call, event.answer)
            elif event.HasField("feed"):
                self.feed.take(event.call, event.feed.data)
            elif event.call:
                self.requests.take(event, now)
            else:
                self._take(event)
        self.requests.gain_tokens(outputs[row:], token_ids[row:], now)
        self.requests.cut_largest()

    def _take(self, event: pb.EngineEvent) -> None:
        match event.WhichOneof("event"):
            case "welcome":
                self._greet(event.welcome)
            case "model_file":
                self.loading.add(event.model_file)
            case "model":
                if self.loading.begin(event.model):
                    self._begin_to_restore()
                else:
                    log.error("the next engine serves another model")
                    self.connection.end = GONE
            case "health":
                self.serving = event.health.serving
                self.serving_changed.set()
            case "fleet":
                self.fleet_serves = event.fleet.serves
            case "statistics_wanted":
                self.connection.say(0, statistics=self.requests.counts.encode())
            case "keys":
                self.keyring = Keyring.decode(event.keys)
            case "adapters":
                self.adapter_names = tuple(event.adapters.names)
            case "goodbye":
                self.connection.end = SHUTTING_DOWN

    def _greet(self, welcome: pb.Welcome) -> None:
        self.requests.unread.most = welcome.unread_bytes
        if welcome.HasField("keys"):
            self.keyring = Keyring.decode(welcome.keys)
        if self.welcome.done():
            self.welcome = asyncio.get_running_loop().create_future()
        self.welcome.set_result(welcome)
        if self._listening is not None:
            self.connection.say(0, listening=self._listening)
        if not self.loading.has_begun:  # no call has a prompt yet
            self._begin_to_restore()
