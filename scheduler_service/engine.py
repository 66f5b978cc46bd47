"""The requests in flight and the loops that have workers serve them.

Every request lives here from the moment it is accepted until its stream is closed; which worker computes it, and how
often that changes, is nobody's concern outside. One `_WorkerLoop` a worker connects, plans, sends, receives and
publishes; when its stream breaks, its groups go back to the head of the shared waiting queue.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import structlog

from pagewire_common.errors import RequestError
from scheduler_service.codec import PROTOCOL_VERSION, WorkerInfo
from scheduler_service.core import (
    FairQueue,
    PriorityQueue,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceOutput,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.prefix_key import root_key
from scheduler_service.model import ServedModel, max_sequence_tokens, model_name
from scheduler_service.request import GenerationRequest, RequestState
from scheduler_service.settings import SchedulerSettings
from scheduler_service.worker_client import Session, WorkerClient, WorkerError

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0

_SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
_STATUS_OF_ERROR = {
    SequenceStatus.FINISHED_IGNORED: grpc.StatusCode.INVALID_ARGUMENT,
    SequenceStatus.FINISHED_ABORTED: grpc.StatusCode.INTERNAL,
}


class Engine:
    """Accepts requests and keeps every worker busy with them. Create it inside the event loop that uses it.

    Raises StartError when the settings name a model file that does not exist.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.waiting = _waiting_queue(settings)
        self.requests: dict[str, RequestState] = {}
        self.workers = [_WorkerLoop(self, address) for address in settings.workers]
        self._model_name = model_name(settings.model)
        self._model: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self._model_lock = asyncio.Lock()
        self._being_checked: set[str] = set()
        self._cache_secret = secrets.token_bytes(32)  # keys of the prefix cache cannot be guessed from outside
        self._is_draining = False
        self._is_empty = asyncio.Event()
        self._num_outages = 0

    # ---- for servicers

    async def model(self) -> ServedModel:
        """The served model; raises UNAVAILABLE when no worker tells of one in time."""
        try:
            return await asyncio.wait_for(self.wait_for_model(), self.settings.no_worker_timeout)
        except TimeoutError:
            raise self._no_worker() from None

    @contextlib.contextmanager
    def admission(self, request_id: str) -> Iterator[None]:
        """Hold a place for a request while it is being checked, so that a flood is refused before any work is done.

        Raises UNAVAILABLE, RESOURCE_EXHAUSTED or ALREADY_EXISTS.
        """
        if self._is_draining:
            raise _SHUTTING_DOWN
        in_flight = len(self.requests) + len(self._being_checked)
        if in_flight >= self.settings.max_num_requests:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{in_flight} requests are in flight; try again later"
            )
        if request_id in self.requests or request_id in self._being_checked:
            raise RequestError(grpc.StatusCode.ALREADY_EXISTS, f"request_id {request_id!r} is in flight already")
        self._being_checked.add(request_id)
        try:
            yield
        finally:
            self._being_checked.discard(request_id)

    def submit(self, request: GenerationRequest, model: ServedModel) -> RequestState:
        """Queue a request, within its `admission`. Raises UNAVAILABLE when the server began to shut down meanwhile."""
        if self._is_draining:
            raise _SHUTTING_DOWN
        cache_root = root_key(self._cache_secret, request.tenant.encode(), request.cache_salt.encode())
        state = RequestState(request, model.tokenizer, cache_root)
        self.requests[request.request_id] = state
        self._is_empty.clear()
        self.waiting.append(state.group)
        self._expire_later(state)
        self.wake()
        return state

    def close(self, state: RequestState) -> None:
        """The reader is gone or done: free whatever the request still holds."""
        if self.requests.pop(state.request.request_id, None) is not None:
            self._finish(state, SequenceStatus.FINISHED_ABORTED)
        if not self.requests:
            self._is_empty.set()

    def abort(self, request_id: str) -> bool:
        """End a request; its stream closes with what it has. Returns whether there was one."""
        state = self.requests.get(request_id)
        if state is None:
            return False
        if self._finish(state, SequenceStatus.FINISHED_ABORTED):
            state.abort()
        return True

    def _finish(self, state: RequestState, status: SequenceStatus) -> bool:
        request_ids = [state.request.request_id]
        schedulers = [worker.scheduler for worker in self.workers if worker.scheduler is not None]
        ended = any(scheduler.finish_requests(request_ids, status) for scheduler in schedulers)
        if not ended and (group := self.waiting.get(request_ids[0])) is not None:  # and no worker is connected
            self.waiting.remove(group.request_id)
            for sequence in group.live:
                sequence.status = status
            ended = True
        self.wake()
        return ended

    # ---- for the service

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker in self.workers:
                    tasks.create_task(worker.run())
        finally:
            for worker in self.workers:
                await worker.client.close()

    async def wait_for_model(self) -> ServedModel:
        """The served model, however long it takes until a worker tells of it."""
        return await asyncio.shield(self._model)

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

    # ---- for the worker loops

    def wake(self) -> None:
        for worker in self.workers:
            worker.wake()

    async def accept(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Check that a worker serves what the others serve; the first one decides. Raises WorkerError."""
        if info.protocol_version != PROTOCOL_VERSION:
            raise WorkerError(f"the worker speaks protocol {info.protocol_version}, this scheduler {PROTOCOL_VERSION}")
        if info.model_id != self._model_name:
            raise WorkerError(f"the worker serves the model {info.model_id!r}, this scheduler {self._model_name!r}")
        async with self._model_lock:
            if not self._model.done():
                with tempfile.TemporaryDirectory(prefix="pagewire-") as directory:
                    await client.fetch_tokenizer(Path(directory))
                    model = await asyncio.to_thread(
                        ServedModel.load,
                        info,
                        Path(directory),
                        max_num_seqs=self.settings.max_num_seqs,
                        has_priorities=self.settings.policy == "priority",
                    )
                self._model.set_result(model)
        model = self._model.result()
        for name, ours, theirs in (
            ("model fingerprint", model.fingerprint, info.model_fingerprint),
            ("dtype", model.dtype, info.dtype),
        ):
            if ours != theirs:
                raise WorkerError(f"the worker's {name} is {theirs}, that of the workers before it {ours}")
        for name, promised, offered in (
            ("longest sequence", model.context_length, max_sequence_tokens(info)),
            ("pool", model.pool_tokens, info.num_device_blocks * info.block_size),
            ("largest step", model.max_num_seqs, min(self.settings.max_num_seqs, info.max_num_seqs)),
        ):
            if offered < promised:
                raise WorkerError(f"the worker's {name} is {offered}; requests were promised {promised}")

    def publish(self, scheduler: Scheduler, gained: Sequence[SequenceOutput]) -> None:
        """Bring sampled tokens to their streams; a stop string found on the way ends its sequence."""
        for item in gained:
            group = item.sequence.group
            state = self.requests.get(group.request_id)
            if state is None or state.group is not group:
                continue
            try:
                if group.error is not None:
                    self.fail(group)
                elif state.process(item):
                    scheduler.finish_sequence(item.sequence, SequenceStatus.FINISHED_STOPPED)
            except Exception as error:  # one request's text must not cost the others their tokens
                log.error("request failed", request_id=group.request_id, exc_info=error)
                self.fail(group)

    def fail(self, group: SequenceGroup) -> None:
        """End a request that the scheduler or the worker gave up on."""
        if state := self.requests.get(group.request_id):
            self._finish(state, SequenceStatus.FINISHED_ABORTED)
            code = next(
                (_STATUS_OF_ERROR[s.status] for s in group.sequences if s.status in _STATUS_OF_ERROR),
                grpc.StatusCode.INTERNAL,
            )
            state.stream.fail(RequestError(code, group.error or "the request could not be served"))

    def connection_lost(self) -> None:
        """A worker is gone; when it was the last one, what waits now waits for a limited time."""
        self._num_outages += 1
        if not self._is_connected:
            for state in self.requests.values():
                self._expire_later(state)

    # ---- waiting without a worker

    @property
    def _is_connected(self) -> bool:
        return any(worker.scheduler is not None for worker in self.workers)

    def _no_worker(self) -> RequestError:
        return RequestError(
            grpc.StatusCode.UNAVAILABLE, f"no worker was connected for {self.settings.no_worker_timeout:g} s"
        )

    def _expire_later(self, state: RequestState) -> None:
        if not self._is_connected:
            loop = asyncio.get_running_loop()
            loop.call_later(self.settings.no_worker_timeout, self._expire, state, self._num_outages)

    def _expire(self, state: RequestState, outage: int) -> None:
        same_outage = outage == self._num_outages and not self._is_connected
        if same_outage and self.requests.get(state.request.request_id) is state:
            self._finish(state, SequenceStatus.FINISHED_ABORTED)
            state.stream.fail(self._no_worker())


class _WorkerLoop:
    """One worker: its connection and, while a session is open, its scheduler."""

    def __init__(self, engine: Engine, address: str) -> None:
        self.client = WorkerClient(address)
        self.scheduler: Scheduler | None = None
        self.epoch = 0
        self.num_steps = 0
        self.num_preemptions = 0  # of earlier sessions
        self.last_error = "not connected yet"
        self._engine = engine
        self._wake = asyncio.Event()
        self._in_flight: SchedulerOutput | None = None  # the step that was sent and not answered

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Connect, serve, and connect again after a pause that grows, for ever."""
        pause = FIRST_RETRY_SECONDS
        while True:
            steps_before = self.num_steps
            level = logging.WARNING
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if not self.epoch:  # it is still starting
                    level = logging.INFO
            except WorkerError as error:
                reason = str(error)
            except Exception as error:  # whatever it is, the other workers and everybody's streams go on
                log.error("worker loop failed", worker=self.client.address, exc_info=error)
                reason = "internal error; the server's log has the details"
            if self.num_steps > steps_before:
                pause = FIRST_RETRY_SECONDS
            if reason != self.last_error:
                log.log(level, "worker unavailable", worker=self.client.address, reason=reason)
            self.last_error = reason
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    async def _serve(self) -> None:
        info = await self.client.get_info()
        await self._engine.accept(self.client, info)
        settings = self._engine.settings
        scheduler = Scheduler(_config(settings, info), self._engine.waiting)
        self.epoch = max(time.time_ns(), info.epoch + 1)
        session = self.client.open_session(self.epoch)
        session.when_broken(self.wake)
        self.scheduler = scheduler
        log.info("worker connected", worker=self.client.address, epoch=self.epoch, blocks=info.num_device_blocks)
        self._in_flight = None
        try:
            while True:
                await self._step(scheduler, session)
        finally:
            self.scheduler = None
            session.close()
            for group in scheduler.release_all(self._in_flight):
                self._engine.fail(group)
            self.num_preemptions += sum(scheduler.num_preemptions.values())
            self._engine.connection_lost()
            self._engine.wake()

    async def _step(self, scheduler: Scheduler, session: Session) -> None:
        self._wake.clear()
        output = scheduler.schedule(time.monotonic())
        for group in output.ignored:
            self._engine.fail(group)
        if output.is_empty and not session.is_broken:
            await self._wake.wait()
            return
        if output.preempted:
            self._engine.wake()  # another worker may have room for them
        self._in_flight = output
        answer = await session.execute(output)
        try:
            gained = scheduler.update_from_output(output, answer, time.monotonic())
        except ValueError as error:
            raise WorkerError(str(error)) from error
        self._in_flight = None
        self.num_steps += 1
        self._engine.publish(scheduler, gained)
        if self._engine.settings.check_invariants:
            scheduler.blocks.check()


def _waiting_queue(settings: SchedulerSettings) -> WaitingQueue:
    match settings.policy:
        case "fcfs":
            return WaitingQueue()
        case "priority":
            return PriorityQueue(settings.overtakes)
        case "fair":
            return FairQueue(settings.tenant_weights)


def _config(settings: SchedulerSettings, info: WorkerInfo) -> SchedulerConfig:
    max_num_batched_tokens = min(settings.max_num_batched_tokens, info.max_num_batched_tokens)
    return SchedulerConfig(
        block_size=info.block_size,
        num_device_blocks=info.num_device_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=min(settings.max_num_seqs, info.max_num_seqs, max_num_batched_tokens),
        max_model_len=info.max_model_len,
        watermark=settings.watermark,
        num_host_blocks=info.num_host_blocks,
        prefix_caching=settings.prefix_caching,
        phase_rule=settings.phase_rule,
        delay_factor=settings.delay_factor,
        preemption_mode=settings.preemption_mode,
        block_bytes=info.block_bytes,
        swap_bytes_per_second=info.swap_bytes_per_second,
        prefill_tokens_per_second=info.prefill_tokens_per_second,
    )
