"""The requests in flight and the loops that have workers serve them.

A request lives here from the moment it is accepted until its stream is closed. Code outside does not see which worker
computes it, or that this changes. Each worker has a `WorkerLoop`; when its session is over, its groups go back to the
head of the shared waiting queue.
"""

import asyncio
import contextlib
import secrets
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from pathlib import Path

import grpc
import structlog

from pagewire_common.errors import RequestError
from scheduler_service.codec import PROTOCOL_VERSION, WorkerInfo
from scheduler_service.core import (
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceOutput,
    SequenceStatus,
    WorkerScheduler,
)
from scheduler_service.core.blocks.prefix_key import block_keys, root_key
from scheduler_service.discovery import Resolve, resolve_by_dns
from scheduler_service.finished_requests import FinishedRequests
from scheduler_service.membership import Departed, Membership
from scheduler_service.model import ServedModel, max_num_seqs, max_sequence_tokens, model_name
from scheduler_service.outage import Outage
from scheduler_service.policy import waiting_queue
from scheduler_service.recording.recorder import NoRecorder, Recorder
from scheduler_service.recording.writer import FileWriter
from scheduler_service.request import GenerationRequest, RequestState
from scheduler_service.request_memory import UnreadOutput
from scheduler_service.settings import SchedulerSettings
from scheduler_service.statistics import Statistics
from scheduler_service.turns import Turns
from scheduler_service.worker_client import WorkerClient, WorkerError
from scheduler_service.worker_loop import WorkerLoop

log = structlog.get_logger()

MAX_BLOCKS = 2**22
"""Blocks of one worker: many times what the largest devices hold, and as many as the scheduler has memory to manage."""

KEYS_AT_ONCE = 1024
"""Keys that are hashed in one turn of the event loop, at 1 µs each. Without this limit a prompt of 131,000 tokens took
24 ms to be planned."""

MIN_REQUEST_BYTES = 1 << 20
BYTES_PER_TOKEN = 12
"""Of the largest prompt. A token id takes at most 3 bytes of a message, a token of text 4 or 5, and of code up to 10. A
MiB takes 3 to 7 ms to parse.
"""

_SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
_RESUMED = RequestError(grpc.StatusCode.ABORTED, "another call goes on with this request")


class Engine:
    """Accepts requests and keeps every worker busy with them. Create it inside the event loop that uses it.

    `resolve` looks up names among the workers. Raises StartError when the settings name a model file that does not
    exist, or a recording that exists.
    """

    def __init__(self, settings: SchedulerSettings, resolve: Resolve = resolve_by_dns) -> None:
        self.settings = settings
        self.waiting = waiting_queue(settings.policy, settings.overtakes, settings.tenant_weights)
        self.requests: dict[str, RequestState] = {}  # by their keys
        self.serving: dict[WorkerScheduler, WorkerLoop] = {}  # by the schedulers of open sessions
        self.statistics = Statistics()
        self.finished = FinishedRequests()
        self._members = Membership(self, resolve)
        self._model_name = model_name(settings.model)
        self.recorder = _recorder(settings)
        self._model: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self._model_lock = asyncio.Lock()
        self._being_checked: dict[str, int] = {}  # bytes, by the keys of requests
        self._aborted: set[str] = set()  # keys of requests that are to end as soon as they have been checked
        self._held_bytes = 0  # by all requests, also while they are checked and after they were superseded
        self._cache_secret = secrets.token_bytes(32)  # keys of the prefix cache cannot be guessed from outside
        self._request_memory = int(settings.request_memory * 2**30)
        self.unread = UnreadOutput(self._request_memory)
        self.turns = Turns()
        self._is_draining = False
        self._is_empty = asyncio.Event()
        self._outage = Outage(settings.no_worker_timeout)

    # ---- for servicers

    async def model(self) -> ServedModel:
        """The served model; raises UNAVAILABLE when no worker tells of one in time."""
        try:
            return await asyncio.wait_for(self.wait_for_model(), self.settings.no_worker_timeout)
        except TimeoutError:
            raise self._no_worker() from None

    @property
    def max_request_bytes(self) -> int:
        """The largest message of a request: for the model's longest prompts and no more, as parsing blocks the loop."""
        context_length = self._model.result().context_length if self._model.done() else 0
        return max(MIN_REQUEST_BYTES, context_length * BYTES_PER_TOKEN)

    @contextlib.contextmanager
    def admission(self, key: str, num_bytes: int = 0, *, resumes: bool = False) -> Iterator[None]:
        """Hold a place for a request while it is being checked, so that a flood is refused before any work is done.

        A request that resumes a request in flight takes its place. `num_bytes` is the memory that the request takes.
        Raises UNAVAILABLE, RESOURCE_EXHAUSTED, ALREADY_EXISTS, or INVALID_ARGUMENT for a request that never fits into
        memory.
        """
        if self._is_draining:
            raise _SHUTTING_DOWN
        has_place = resumes and key in self.requests
        in_flight = len(self.requests) + len(self._being_checked)
        if in_flight >= self.settings.max_num_requests and not has_place:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{in_flight} requests are in flight; try again later"
            )
        if key in self._being_checked or (key in self.requests and not has_place):
            raise RequestError(
                grpc.StatusCode.ALREADY_EXISTS,
                "request_id is in flight already; choose another one, or set resume to go on with a broken stream",
            )
        self.hold(key, num_bytes)
        try:
            yield
        finally:
            self._aborted.discard(key)
            self._held_bytes -= self._being_checked.pop(key, 0)

    def hold(self, key: str, num_bytes: int) -> None:
        """Count memory of a request, in addition to what it holds. Within its `admission`, whose errors it raises."""
        in_all = self._being_checked.get(key, 0) + num_bytes
        most = self._request_memory
        sizes = f"this request takes {in_all / 2**20:.1f} MiB of memory, and --request-memory allows all together "
        sizes += f"{most / 2**20:.1f} MiB"
        if in_all > most:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"{sizes}; send a smaller one")
        if num_bytes > most - self._held_bytes:
            held = f"requests in flight hold {self._held_bytes / 2**20:.1f} MiB"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{sizes}, of which {held}; try again later")
        self._being_checked[key] = in_all
        self._held_bytes += num_bytes

    async def block_keys(self, request: GenerationRequest, model: ServedModel) -> list[bytes]:
        """A request's keys in the prefix cache if they are too many for one turn of the event loop, otherwise none."""
        token_ids = array("I", request.prompt_token_ids)
        for output in request.resumption.token_ids[:1]:
            token_ids.extend(output)
        keys: list[bytes] = []
        if self.settings.prefix_caching and len(token_ids) > KEYS_AT_ONCE * model.block_size:
            remaining = block_keys(self._cache_root(request), token_ids, model.block_size)
            while some := list(islice(remaining, KEYS_AT_ONCE)):
                keys += some
                await asyncio.sleep(0)
        return keys

    def _cache_root(self, request: GenerationRequest) -> bytes:
        return root_key(self._cache_secret, request.tenant.encode(), request.cache_salt.encode())

    def submit(self, request: GenerationRequest, model: ServedModel, keys: Sequence[bytes] = ()) -> RequestState:
        """Queue a request, within its `admission`. `keys` are its `block_keys`; without them the core makes them later.

        Raises UNAVAILABLE when the server began to shut down meanwhile.
        """
        if self._is_draining:
            raise _SHUTTING_DOWN
        root = self._cache_root(request)
        state = RequestState(request, model.tokenizer, root, self.statistics, self.turns, self.unread)
        state.group.sequences[0].block_keys += keys
        self.requests[request.key] = state
        state.num_bytes = self._being_checked.pop(request.key, 0)
        self._is_empty.clear()
        self.waiting.append(state.group)
        self.recorder.arrived(state.group)
        self._expire_later(state)
        self.wake()
        if request.key in self._aborted:
            self.abort(request.key)
        return state

    def close(self, state: RequestState) -> None:
        """The reader is gone or done: free everything that the request still holds."""
        state.stream.leave()
        self._held_bytes -= state.num_bytes
        state.num_bytes = 0
        self._leave(state)

    def _leave(self, state: RequestState) -> None:
        key = state.group.request_id
        if self.requests.get(key) is state:
            del self.requests[key]
            if state.expiry is not None:
                state.expiry.cancel()
            self._finish(state, SequenceStatus.FINISHED_ABORTED)
        if not self.requests:
            self._is_empty.set()

    def supersede(self, request: GenerationRequest) -> None:
        """End what is left of the same request's broken stream, because this one goes on with it.

        The stream's memory counts until it is closed: its client may have left a message unread.
        Raises ALREADY_EXISTS when the request in flight under its key has another prompt.
        """
        state = self.requests.get(request.key)
        if state is None:
            return
        if state.request.prompt_token_ids != request.prompt_token_ids:
            raise RequestError(
                grpc.StatusCode.ALREADY_EXISTS,
                "request_id is in flight already, with another prompt; a request that resumes is sent again as it was",
            )
        self._leave(state)
        state.stream.cut(_RESUMED)

    def abort(self, key: str) -> bool:
        """End a request; its stream closes with what it has. Returns whether the request exists.

        A request that is being checked ends after the check.
        """
        is_being_checked = key in self._being_checked
        if is_being_checked:
            self._aborted.add(key)
        state = self.requests.get(key)
        if state is None:
            return is_being_checked
        if self._finish(state, SequenceStatus.FINISHED_ABORTED):
            state.abort()
        return True

    def _finish(self, state: RequestState, status: SequenceStatus) -> bool:
        if state.group.is_finished:
            return False  # by itself, as most do: no scheduler need be asked
        request_ids = [state.group.request_id]
        schedulers = [worker.scheduler for worker in self.workers if worker.scheduler is not None]
        ended = any(scheduler.finish_requests(request_ids, status) for scheduler in schedulers)
        if not ended and (group := self.waiting.get(request_ids[0])) is not None:  # and no worker is connected
            self.waiting.end(group.request_id)
            for sequence in group.live:
                sequence.status = status
            self.recorder.withdrawn(group, status)
            ended = True
        self.wake()
        return ended

    # ---- for the service

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await self._members.run()
        finally:
            self.recorder.close()

    async def wait_for_model(self) -> ServedModel:
        """The served model, however long it takes until a worker tells of it."""
        return await asyncio.shield(self._model)

    def watch_health(self) -> AsyncIterator[bool]:
        """Whether requests are worth sending here, from the first worker on and whenever that changes."""
        return self._outage.watch_health()

    async def drain(self, grace: float) -> None:
        """Admit nothing more, wait until every stream has been closed, and end those left after `grace` seconds."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                if self.requests:
                    await self._is_empty.wait()
        for state in self.requests.values():
            self._finish(state, SequenceStatus.FINISHED_ABORTED)
            state.stream.fail(_SHUTTING_DOWN)

    # ---- for operators

    @property
    def is_draining(self) -> bool:
        """Whether nothing more is admitted, because the server is shutting down."""
        return self._is_draining

    @property
    def departed(self) -> Departed:
        """Sums over the workers that have left."""
        return self._members.departed

    @property
    def workers(self) -> list[WorkerLoop]:
        """The workers that are known at the moment, connected or not."""
        return self._members.workers

    def drain_worker(self, address: str) -> None:
        """Give a worker no more requests; its own finish there, or move. Raises NOT_FOUND for an unknown address."""
        self._members.find(address).drain()

    def undrain_worker(self, address: str) -> None:
        """Give a worker work again. Raises NOT_FOUND for an unknown address."""
        self._members.find(address).undrain()

    # ---- for the worker loops

    @property
    def admits(self) -> bool:
        """Whether any worker takes requests."""
        return self._members.admits

    def wake(self) -> None:
        self._members.wake()

    def wake_for(self, output: SchedulerOutput) -> None:
        """Wake the workers that a step has left groups to."""
        for placement in (*output.moved, *output.placements):
            if placement.to is not None:
                self.serving[placement.to].wake()

    async def accept(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Check that a worker serves what the others serve; the first one decides. Raises WorkerError."""
        if info.protocol_version != PROTOCOL_VERSION:
            raise WorkerError(f"the worker speaks protocol {info.protocol_version}, this scheduler {PROTOCOL_VERSION}")
        if info.model_id != self._model_name:
            raise WorkerError(f"the worker serves the model {info.model_id!r}, this scheduler {self._model_name!r}")
        if (num_blocks := info.num_device_blocks + info.num_host_blocks) > MAX_BLOCKS:
            raise WorkerError(f"the worker has {num_blocks} blocks; this scheduler manages at most {MAX_BLOCKS}")
        async with self._model_lock:
            if not self._model.done():
                with tempfile.TemporaryDirectory(prefix="pagewire-") as directory:
                    await client.fetch_tokenizer(Path(directory))
                    model = await asyncio.to_thread(
                        ServedModel.load,
                        info,
                        Path(directory),
                        max_num_seqs=max_num_seqs(self.settings, info),
                        has_priorities=self.settings.policy == "priority",
                    )
                self._model.set_result(model)
        model = self._model.result()
        for name, ours, theirs in (
            ("model fingerprint", model.fingerprint, info.model_fingerprint),
            ("dtype", model.dtype, info.dtype),
            ("block size", model.block_size, info.block_size),
        ):
            if ours != theirs:
                raise WorkerError(f"the worker's {name} is {theirs}; that of earlier workers is {ours}")
        for name, promised, offered in (
            ("longest sequence", model.context_length, max_sequence_tokens(info)),
            ("pool", model.pool_tokens, info.num_device_blocks * info.block_size),
            ("largest step", model.max_num_seqs, max_num_seqs(self.settings, info)),
        ):
            if offered < promised:
                raise WorkerError(f"the worker's {name} is {offered}; requests were promised {promised}")

    def admitted(self, output: SchedulerOutput) -> None:
        """Take note of the requests that came to a worker with this step."""
        now = time.monotonic()
        for new in output.new_sequences:
            if (state := self.requests.get(new.sequence.group.request_id)) is not None:
                state.admitted(now)

    def publish(self, scheduler: Scheduler, gained: Sequence[SequenceOutput]) -> None:
        """Bring sampled tokens to their streams; a stop string found on the way ends its sequence."""
        now = time.monotonic()
        for item in gained:
            group = item.sequence.group
            state = self.requests.get(group.request_id)
            if state is None or state.group is not group:
                continue
            try:
                if group.error is not None:
                    self.fail(group)
                elif state.process(item, now):
                    scheduler.finish_sequence(item.sequence, SequenceStatus.FINISHED_STOPPED)
            except Exception as error:  # one request's text must not cost the others their tokens
                log.error("request failed", request_id=group.request_id, exc_info=error)
                self.fail(group)
        if self.unread.is_too_much:
            for state in sorted(self.requests.values(), key=lambda state: -state.stream.num_unread):
                if self.unread.is_too_much:
                    self._cut(state)

    def _cut(self, state: RequestState) -> None:
        """End a request for the output that its client has not read."""
        reason = (
            f"this request has {state.stream.num_unread / 2**20:.1f} MiB of output that its client has not read, or "
            "that waits until the best outputs are known: the most of all requests, which together may have "
            f"{self.unread.most / 2**20:.1f} MiB (a quarter of --request-memory); read faster, or ask for fewer "
            "log-probabilities or outputs"
        )
        self._finish(state, SequenceStatus.FINISHED_ABORTED)
        state.stream.cut(RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))

    def fail(self, group: SequenceGroup) -> None:
        """End a request that the scheduler or the worker gave up on."""
        if state := self.requests.get(group.request_id):
            self._finish(state, SequenceStatus.FINISHED_ABORTED)
            is_ignored = any(sequence.status is SequenceStatus.FINISHED_IGNORED for sequence in group.sequences)
            code = grpc.StatusCode.INVALID_ARGUMENT if is_ignored else grpc.StatusCode.INTERNAL
            state.stream.fail(RequestError(code, group.error or "the request could not be served"))

    def workers_changed(self) -> None:
        """A session began or ended, or a worker was drained or undrained.

        While no worker takes requests, waiting requests have limited time.
        """
        was_on = self._outage.is_on
        self._outage.set(not self.admits)
        if self._outage.is_on != was_on:
            for state in self.requests.values():
                self._expire_later(state)
        self.wake()

    # ---- waiting without a worker

    def _expire_later(self, state: RequestState) -> None:
        """Limit how long a request waits through this outage, if there is one."""
        if state.expiry is not None:
            state.expiry.cancel()
            state.expiry = None
        if self._outage.is_on:
            loop = asyncio.get_running_loop()
            state.expiry = loop.call_later(self.settings.no_worker_timeout, self._expire, state)

    def _expire(self, state: RequestState) -> None:
        if state.group.request_id not in self.waiting:
            self._expire_later(state)  # a worker that is drained computes it, and may yet give it back
            return
        self._finish(state, SequenceStatus.FINISHED_ABORTED)
        state.stream.fail(self._no_worker())

    def _no_worker(self) -> RequestError:
        return RequestError(
            grpc.StatusCode.UNAVAILABLE, f"no worker took requests for {self.settings.no_worker_timeout:g} s"
        )


def _recorder(settings: SchedulerSettings) -> NoRecorder:
    if settings.record is None:
        return NoRecorder()
    return Recorder(
        FileWriter(settings.record),
        policy=settings.policy,
        overtakes=settings.overtakes,
        tenant_weights=settings.tenant_weights,
    )
