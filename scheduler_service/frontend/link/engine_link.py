"""A front end's link to the engine: the connection, the requests in flight, the served model, and settings."""

import asyncio
import contextlib
import time

import grpc
from opentelemetry.trace import Tracer

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError, RequestLimits
from scheduler_service.access.keys import Keyring
from scheduler_service.frontend.link.admissions import Admissions
from scheduler_service.frontend.link.engine_connection import EngineConnection
from scheduler_service.frontend.link.message_limits import request_limits
from scheduler_service.frontend.link.model_loading import ModelLoading
from scheduler_service.frontend.link.patience import patience
from scheduler_service.frontend.link.request_registry import RequestRegistry
from scheduler_service.frontend.model import ServedModel

SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
_NO_TOKENIZER = "the model's tokenizer cannot be loaded; the server's log and GetClusterState say why"


class EngineLink:
    """The front end's link to the engine. Create the link inside the running event loop.

    `run` processes the engine's messages. `welcome` is a future for the engine's first message.
    """

    def __init__(self, target: str, tracer: Tracer | None = None) -> None:
        self.connection = EngineConnection(target)
        self.requests = RequestRegistry(self.connection)
        self.loading = ModelLoading(self.connection)
        self.admissions = Admissions()
        self.welcome: asyncio.Future[pb.Welcome] = asyncio.get_running_loop().create_future()
        self.tracer = tracer
        """Creates the trace spans of requests; None if tracing is off."""
        self.keyring: Keyring | None = None
        """The API keys that calls may use; None if calls need no API key."""
        self.adapter_names: tuple[str, ...] = ()
        """Names of the adapters that requests may use, in alphabetical order."""
        self.serving = False
        self.serving_changed = asyncio.Event()

    # ---- for servicers

    async def model(self) -> ServedModel:
        """Wait for the served model.

        Raises UNAVAILABLE if no worker describes the model in time, or if the model cannot be loaded.
        """
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

    @property
    def request_limits(self) -> RequestLimits:
        """Limits on the size of a message with a request."""
        return request_limits(self.loading.model)

    def admit(self, call: int, admit: pb.Admit, num_bytes: int) -> asyncio.Future[pb.Answer]:
        """Ask the engine to admit a call, which already takes `num_bytes` of memory.

        Raises RESOURCE_EXHAUSTED if the calls that wait for admission have too many bytes.
        """
        self.admissions.check_room(num_bytes, self.requests.unread.most, self.loading.model)
        answer = self.connection.question(call, admit=admit)
        self.admissions.count(admit.api_key_id, num_bytes, answer)
        return answer

    async def abort(self, key: str) -> bool:
        """End a request, which may belong to another front end. Returns whether the request existed."""
        number = self.connection.new_number()
        answer = await self.connection.ask(number, abort=pb.AbortRequestByKey(key=key))
        return answer.found

    # ---- the engine's messages

    async def run(self) -> bool:
        """Process the engine's messages until the engine says goodbye or is gone, and then fail all remaining requests.

        Returns whether the engine said goodbye.
        """
        try:
            async with contextlib.aclosing(self.connection.messages()) as messages:
                async for message in messages:
                    self.take(message, time.monotonic())
                    if self.connection.end is not None:
                        return True
        finally:
            self.loading.cancel()
            self.requests.fail_all(self.connection.finish())
        return False

    def take(self, message: pb.AttachResponse, now: float) -> None:
        """Deliver the tokens and events of a message to their requests, in order."""
        outputs, token_ids = list(message.outputs), list(message.token_ids)
        row = 0
        for event in message.events:
            if event.row > row:
                self.requests.gain_tokens(outputs[row : event.row], token_ids[row : event.row], now)
                row = event.row
            if event.HasField("answer"):
                self.connection.answer(event.call, event.answer)
            elif event.call:
                self.requests.take(event, now)
            else:
                self._take(event)
        self.requests.gain_tokens(outputs[row:], token_ids[row:], now)
        self.requests.cut_largest()

    def _take(self, event: pb.EngineEvent) -> None:
        """Process an event of the engine that belongs to no call."""
        match event.WhichOneof("event"):
            case "welcome":
                self.requests.unread.most = event.welcome.unread_bytes
                if event.welcome.HasField("keys"):
                    self.keyring = Keyring.decode(event.welcome.keys)
                self.welcome.set_result(event.welcome)
            case "model_file":
                self.loading.add(event.model_file)
            case "model":
                self.loading.begin(event.model)
            case "health":
                self.serving = event.health.serving
                self.serving_changed.set()
            case "statistics_wanted":
                self.connection.say(0, statistics=self.requests.counts.encode())
            case "keys":
                self.keyring = Keyring.decode(event.keys)
            case "adapters":
                self.adapter_names = tuple(event.adapters.names)
            case "goodbye":
                self.connection.end = SHUTTING_DOWN
