"""The engine's gRPC service for front ends, and the sum of their status and counts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import structlog

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1.engine_service_pb2_grpc import EngineServiceServicer
from pagewire_common.calls.errors import RequestError
from scheduler_service.access.keys import Keyring
from scheduler_service.engine.calls.admission import unread_bytes
from scheduler_service.engine.calls.calls import Call, Outbox
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.front_ends.pages import Pages
from scheduler_service.engine.front_ends.scrapes import Scrapes
from scheduler_service.engine.front_ends.stored_entries import StoredEntries
from scheduler_service.statistics.counts import CountsByTenant
from scheduler_service.wire.messages import Pace

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

_SERVER_STOPPED = "Server already stopped."  # the text of gRPC's private error for calls that are open then
FILE_BYTES = 1 << 20
EVENTS_AT_ONCE = 64
"""Events in one turn of the event loop, each 10 to 100 µs."""
_INTERNAL = RequestError(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
STATISTICS_SECONDS = 1.0
"""Seconds that a scrape waits for front ends' counts."""
SHOW_SECONDS = 10.0
"""Seconds at the start until one front end that listens, or is SERVING, suffices."""
OUTAGE_SECONDS = 1.0
"""Seconds without a worker after which front ends answer 503 to readiness probes over HTTP."""
_REFUSED = pb.Answer(code=grpc.StatusCode.ABORTED.value[0], message="the call was refused")
"""The answer to a request that was submitted before its front end knew that the call was refused."""
BEAT_SECONDS = 5.0
MAX_SILENT_SECONDS = 30.0
"""Seconds without counts, asked for every BEAT_SECONDS, after which a hanging front end is killed. Its counts since the
last answer are lost.
"""


class FrontEnds(EngineServiceServicer):
    """Memory limits are divided by `num_expected`. `kill` takes a process id."""

    def __init__(
        self,
        engine: Engine,
        num_expected: int,
        kill: Callable[[int], None] = lambda process_id: None,  # noqa: ARG005
    ) -> None:
        self.engine = engine
        engine.adapters.when_changed = self._tell_adapters
        self.kill = kill
        self.num_expected = num_expected
        self.connections: set[FrontEndConnection] = set()
        self.entries = StoredEntries()
        self.scrapes = Scrapes(lambda: engine.keyring)
        self.pages = Pages(engine)
        self.is_serving = False
        self.is_over = False
        self._changed = asyncio.Event()
        self._tenants: set[str] = set()  # counted separately
        self._gone = CountsByTenant(self._tenants)  # of front ends that have left
        self.error = ""
        """Why a front end cannot load the model; empty once all have loaded it."""

    async def Attach(  # type: ignore[override]  # writes to the context
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> None:
        connection = FrontEndConnection(self)
        self.connections.add(connection)
        self.engine.requests.outboxes.add(connection.outbox)
        tasks = [
            asyncio.create_task(connection.read(request_iterator)),
            asyncio.create_task(connection.write(context)),
            asyncio.create_task(connection.watch()),
            asyncio.create_task(connection.watch_backlog()),
            asyncio.create_task(connection.tell_model()),
            asyncio.create_task(connection.tell_fleet()),
        ]
        try:
            await asyncio.wait(tasks[:4], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self.connections.discard(connection)
            self.engine.requests.outboxes.discard(connection.outbox)
            connection.close()
            self._gone.add(connection.counts)
            self.note_change()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and str(result) != _SERVER_STOPPED:
                    log.error("front end failed", exc_info=result)

    def note_change(self) -> None:
        """A front end attached, detached or changed its status."""
        self._changed.set()
        if len(self.connections) >= self.num_expected and all(connection.has_loaded for connection in self.connections):
            self.error = ""

    async def until_serving(self) -> None:
        """Wait until every front end reports SERVING, or any after SHOW_SECONDS."""
        await self._until(lambda connection: connection.shows_serving, "shows SERVING")

    def tell_serving(self, *, serving: bool) -> None:
        self.is_serving = serving
        for connection in self.connections:
            connection.outbox.tell(0, health=pb.Health(serving=serving))

    def set_keys(self, keyring: Keyring) -> None:
        """Require one of these API keys from now on."""
        self.engine.set_keys(keyring)
        keys = keyring.encode()
        for connection in self.connections:
            connection.outbox.tell(0, keys=keys)

    def _tell_adapters(self) -> None:
        for connection in self.connections:
            connection.tell_adapters()

    async def wait_until_listening(self) -> str:
        """Wait until all expected front ends listen, or any after SHOW_SECONDS. Returns their shared address."""
        await self._until(lambda connection: bool(connection.address), "listens")
        return next(connection.address for connection in self.connections if connection.address)

    async def _until(self, holds: Any, does: str) -> None:
        """Wait until it holds for all expected front ends or, because one may hang, for any after SHOW_SECONDS."""
        try:
            async with asyncio.timeout(SHOW_SECONDS):
                while len(self.connections) < self.num_expected or not all(map(holds, self.connections)):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if not any(map(holds, self.connections)):
                log.error(f"not ready: no front end {does}", reason=self.error)
            while not any(map(holds, self.connections)):
                self._changed.clear()
                await self._changed.wait()

    async def counts(self) -> CountsByTenant:
        """The sum of all front ends' counts since the start; last counts of those that do not answer in time."""
        asked = list(self.connections)
        await asyncio.gather(*(connection.ask_counts(STATISTICS_SECONDS) for connection in asked))
        total = CountsByTenant(self._tenants)
        for counts in (self._gone, *(connection.counts for connection in self.connections)):
            total.add(counts)
        return total

    async def say_goodbye(self, seconds: float) -> None:
        """Tell all front ends to end, and wait at most `seconds` until they have detached."""
        self.is_over = True
        for connection in self.connections:
            connection.outbox.tell(0, goodbye=pb.Goodbye())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.connections:
                    self._changed.clear()
                    await self._changed.wait()


class FrontEndConnection:
    def __init__(self, front_ends: FrontEnds) -> None:
        self._front_ends = front_ends
        self._engine = engine = front_ends.engine
        most_bytes = unread_bytes(engine.settings) // front_ends.num_expected
        self.outbox = Outbox(most_bytes)
        self.address = ""
        self.process_id = 0
        self.has_loaded = False
        self.shows_serving = False
        self.counts = CountsByTenant()
        self._counts_came = asyncio.Event()
        self._calls: dict[int, Call] = {}  # by number
        self._reading: set[asyncio.Task[None]] = set()  # of metrics
        self.outbox.tell(
            0,
            welcome=pb.Welcome(
                no_worker_timeout=engine.settings.no_worker_timeout,
                stall_timeout=engine.settings.stall_timeout,
                unread_bytes=most_bytes,
                cache_secret=engine.cache_secret,
                resume_secret=engine.settings.resume_key,
                can_kill_worker=engine.settings.learn_pipe is not None,
                prefix_caching=engine.settings.prefix_caching,
                keys=None if engine.keyring is None else engine.keyring.encode(),
            ),
        )
        self.tell_adapters()
        if front_ends.is_over:
            self.outbox.tell(0, goodbye=pb.Goodbye())

    def tell_adapters(self) -> None:
        self.outbox.tell(
            0, adapters=pb.Names(names=[adapter.name for adapter in self._engine.adapters.catalogue.listed])
        )

    def close(self) -> None:
        """Close all calls; their clients are disconnected too."""
        for reading in self._reading:
            reading.cancel()
        self._front_ends.pages.leave(self.outbox)
        for call in self._calls.values():
            self._engine.close(call)
        self._calls.clear()

    async def ask_counts(self, seconds: float) -> bool:
        """Returns whether the counts arrived within `seconds`."""
        self._counts_came.clear()
        self.outbox.tell(0, statistics_wanted=pb.StatisticsWanted())
        try:
            await asyncio.wait_for(self._counts_came.wait(), seconds)
        except TimeoutError:
            return False
        return True  # even if another task has asked for counts and cleared the event meanwhile

    async def watch(self) -> None:
        while await self.ask_counts(MAX_SILENT_SECONDS):  # noqa: ASYNC110
            await asyncio.sleep(BEAT_SECONDS)
        log.error("front end hangs and is ended", seconds=MAX_SILENT_SECONDS)
        self._front_ends.kill(self.process_id)

    async def watch_backlog(self) -> None:
        """Kill the front end when its outbox exceeds its limit."""
        await self.outbox.is_overfull.wait()
        log.error("front end takes nothing and is ended", waiting=len(self.outbox))
        self._front_ends.kill(self.process_id)

    # ---- messages from the engine

    async def write(self, context: Context) -> None:
        outbox, pace = self.outbox, Pace()
        while True:
            await outbox.has_some.wait()
            await pace.wait()
            try:
                while len(outbox):
                    await context.write(outbox.take())
            except grpc.aio.InternalError:  # gRPC raises this error if the stream ends during a write
                return

    async def tell_model(self) -> None:
        """Send the model's files, its limits and the health, once a worker has described the model."""
        model = await self._engine.fleet.agreement.wait_for_model()
        for name, data in self._engine.fleet.agreement.model_files.items():
            for start in range(0, len(data), FILE_BYTES):
                part = pb.ModelFile(name=name, data=data[start : start + FILE_BYTES])
                self.outbox.tell(0, model_file=part)
        self.outbox.tell(0, model=model)
        self.outbox.tell(0, health=pb.Health(serving=self._front_ends.is_serving))

    async def tell_fleet(self) -> None:
        """Tell whether workers take requests, until cancelled."""
        async for serves in self._engine.workers.outage.watch_health(OUTAGE_SECONDS):
            self.outbox.tell(0, fleet=pb.Fleet(serves=serves))

    # ---- messages from the front end

    async def read(self, messages: AsyncIterator[pb.AttachRequest]) -> None:
        async for message in messages:
            for number, event in enumerate(message.events, 1):
                self._do(event)
                if number % EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _do(self, event: pb.FrontendEvent) -> None:
        match event.WhichOneof("event"):
            case "admit":
                admit = event.admit
                admitted = Call(self.outbox, event.call, admit.key, admit.api_key_id)
                if self._answer(
                    admitted,
                    lambda: self._engine.admit(
                        admitted,
                        admit.num_bytes,
                        resumes=admit.resumes,
                        restores=admit.restores,
                        adapter_name=admit.adapter_name,
                        adapter_id=admit.adapter_id,
                    ),
                ):
                    self._calls[event.call] = admitted
            case "hold":
                if (holding := self._calls.get(event.call)) is None:
                    self.outbox.tell(event.call, answer=_REFUSED)
                else:
                    self._answer(holding, lambda: self._engine.hold(holding, event.hold.num_bytes))
            case "submit":
                if (parent := self._calls.get(event.submit.part_of)) is not None:
                    self._calls[event.call] = Call(self.outbox, event.call, event.submit.key, parent=parent)
                if (submitted := self._calls.get(event.call)) is None:
                    self.outbox.tell(event.call, answer=_REFUSED)
                else:
                    self._answer(submitted, lambda: self._engine.submit(submitted, event.submit))
            case "unserved":
                asking = Call(self.outbox, event.call, "")
                self._answer(asking, lambda: self._engine.requests.refuse_unserved(event.unserved.seconds))
            case "stop_output":
                if (call := self._calls.get(event.call)) is not None:
                    self._engine.requests.stop_output(call, event.stop_output.index)
            case "abort":
                found = self._engine.requests.abort(event.abort.key)
                self.outbox.tell(event.call, answer=pb.Answer(found=found))
            case "store_entry" | "read_entry" | "delete_entry":
                self.outbox.tell(event.call, answer=self._front_ends.entries.answer(event))
            case "read_metrics":
                reading = asyncio.create_task(self._tell_metrics(event.call, event.read_metrics.authorization))
                self._reading.add(reading)
                reading.add_done_callback(self._reading.discard)
            case "open_feed" | "close_feed" | "administer":
                self._front_ends.pages.take(self.outbox, event)
            case "close":
                if (closed := self._calls.pop(event.call, None)) is not None:
                    self._engine.close(closed, event.close.finished if event.close.HasField("finished") else None)
                if event.close.is_answered:
                    self.outbox.tell(event.call, answer=pb.Answer())
            case "listening":
                self.address, self.process_id = event.listening.address, event.listening.process_id
                self._front_ends.note_change()
            case "health_shown":
                self.has_loaded, self.shows_serving = True, event.health_shown.serving
                self._front_ends.note_change()
            case "load_failed":
                failed = "a front end cannot load the model's tokenizer, and tries again"
                self._front_ends.error = f"{failed}: {event.load_failed.reason}"
            case "statistics":
                self.counts = CountsByTenant.decode(event.statistics)
                self._counts_came.set()

    async def _tell_metrics(self, call: int, authorization: str) -> None:
        self.outbox.tell(call, answer=await self._front_ends.scrapes.answer(authorization))

    def _answer(self, call: Call, do: Any) -> bool:
        """Answer with success or the error of `do`. Returns whether `do` succeeded."""
        try:
            do()
        except RequestError as error:
            call.tell(answer=pb.Answer(code=error.code.value[0], message=str(error)))
            return False
        except Exception as error:  # other requests' streams go on
            log.error("request could not be queued", key=call.key, exc_info=error)
            call.tell(answer=pb.Answer(code=_INTERNAL.code.value[0], message=str(_INTERNAL)))
            return False
        call.tell(answer=pb.Answer(adapter_id=call.adapter_id))
        return True
