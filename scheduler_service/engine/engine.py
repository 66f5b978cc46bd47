"""The requests in flight, and the workers that serve them.

A request lives here from the moment a front end submits it until its call is closed. Code outside does not see which
worker computes it, or that this changes. Each worker has a `WorkerLoop`; when its session is over, its groups go back
to the head of the shared waiting queue. What the requests gain goes to the front ends that their calls came through.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import grpc
import structlog

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_common.calls.errors import RequestError
from pagewire_common.connection.tls import TlsFolder
from scheduler_service.access.keys import Keyring
from scheduler_service.core import (
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceOutput,
    SequenceStatus,
    WorkerScheduler,
)
from scheduler_service.core.config import MAX_BLOCKS
from scheduler_service.core.queues.policy import waiting_queue
from scheduler_service.engine.adapters.adapter_fetcher import AdapterFetcher
from scheduler_service.engine.adapters.adapters import Adapters
from scheduler_service.engine.calls.admission import Admission
from scheduler_service.engine.calls.calls import Call
from scheduler_service.engine.calls.outbox import Outbox
from scheduler_service.engine.worker_link.client import WorkerClient, WorkerError
from scheduler_service.engine.worker_link.limits import check_limits, model_limits, model_name, scheduler_config
from scheduler_service.engine.workers.discovery import Resolve, resolve_by_dns
from scheduler_service.engine.workers.membership import Departed, Membership
from scheduler_service.engine.workers.outage import Outage, why_unserved
from scheduler_service.engine.workers.worker_loop import WorkerLoop
from scheduler_service.recording.recorder import NoRecorder, Recorder
from scheduler_service.recording.writer import FileWriter
from scheduler_service.settings import SchedulerSettings
from scheduler_service.statistics.counts import Statistics
from scheduler_service.statistics.finished_requests import FinishedRequests
from scheduler_service.wire.codec import PROTOCOL_VERSION, WorkerInfo
from scheduler_service.wire.submission import decode_group, pack

log = structlog.get_logger()

LONG_FETCH_SECONDS = 5.0
"""After which another worker is asked for the model's files."""
UNSERVED_SECONDS = 2.5
"""Without a worker, after which a shutdown waits no longer: attempts to connect are two seconds apart at most."""
SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
_RESUMED = RequestError(grpc.StatusCode.ABORTED, "another call goes on with this request")


class Engine:
    """Accepts requests of front ends and keeps every worker busy with them. Create it inside its event loop.

    `resolve` looks up names among the workers. Raises StartError when the settings name a model file that does not
    exist, certificates that cannot be used, or a recording that exists.
    """

    def __init__(
        self, settings: SchedulerSettings, resolve: Resolve = resolve_by_dns, keyring: Keyring | None = None
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        """The API keys that calls need; None where they need none."""
        self._weights = _tenant_weights(settings, keyring)
        self.waiting = waiting_queue(settings.policy, settings.overtakes, self._weights)
        self.requests: dict[str, Call] = {}  # those that were submitted, by their keys
        self.traced: set[Call] = set()  # those of them that are traced
        self.serving: dict[WorkerScheduler, WorkerLoop] = {}  # by the schedulers of open sessions
        self.outboxes: set[Outbox] = set()  # of the front ends
        self.statistics = Statistics()
        self.finished = FinishedRequests()
        self.admission = Admission(settings, self.requests, keyring)
        self.cache_secret = secrets.token_bytes(32)  # keys of the prefix cache cannot be guessed from outside
        self.model_files: dict[str, bytes] = {}
        self.adapters = Adapters(settings, self)
        self._worker_tls = TlsFolder(settings.worker_tls) if settings.worker_tls is not None else None
        self._members = Membership(self, resolve)
        self._model_name = model_name(settings.model)
        self.recorder = _recorder(settings, self._weights)
        self._limits: asyncio.Future[pb.ModelLimits] = asyncio.get_running_loop().create_future()
        self._asked: asyncio.Event | None = None  # while a worker is asked for the model's files: to be set in the end
        self._is_draining = False
        self._is_over = False
        self._is_empty = asyncio.Event()
        self._outage = Outage(settings.no_worker_timeout)  # no worker takes requests
        self._absence = Outage(UNSERVED_SECONDS)  # no worker has a session

    # ---- for front ends

    def admit(self, call: Call, num_bytes: int, *, resumes: bool = False, lora_name: str = "") -> None:
        """Hold a place for a call while it is checked, so that a flood is refused before any work is done.

        Raises UNAVAILABLE, RESOURCE_EXHAUSTED, ALREADY_EXISTS, NOT_FOUND for an unknown adapter, or INVALID_ARGUMENT
        for a request that never fits into memory.
        """
        if self._is_draining and call.key:
            raise SHUTTING_DOWN
        adapter = self.adapters.find(lora_name) if lora_name else ""
        self.admission.admit(call, num_bytes, resumes=resumes, now=time.monotonic())
        call.lora_name, call.adapter = lora_name, adapter

    def hold(self, call: Call, num_bytes: int) -> None:
        """Have an admitted call take so much more memory, for texts of it. Raises what `admit` raises for memory."""
        call.has_texts = True
        self.admission.hold(call, num_bytes)

    def submit(self, call: Call, submission: pb.Submit) -> None:
        """Queue a request that was admitted, or a text of a call that was.

        Raises UNAVAILABLE when the server began to shut down meanwhile, or for a text is shut down, ALREADY_EXISTS when
        it would supersede a request of another prompt, and what `admit` raises for its memory.
        """
        if self._is_draining and (call.parent is None or self._is_over):
            raise SHUTTING_DOWN
        self.admission.hold(call, submission.num_bytes)
        if call.adapter:
            self.adapters.check_held(call.adapter)
        superseded = self._supersede(call, submission) if submission.supersedes else None
        if submission.is_complete:
            return
        call.first_output = submission.first_output
        if submission.HasField("no_worker_timeout"):
            call.no_worker_timeout = submission.no_worker_timeout
        call.group = decode_group(call.key, submission, time.monotonic(), call.adapter)
        self.admission.submitted(call, superseded)
        if call.group.trace_parent:
            self.traced.add(call)
        self.waiting.append(call.group)
        self.recorder.arrived(call.group)
        self._expire_later(call)
        self.wake()
        if call.is_aborted:
            self.abort(call.key)

    def stop_output(self, call: Call, index: int) -> None:
        """A stop string ended an output. Nothing happens when it has ended otherwise by now."""
        group = call.group
        if group is None or group.beams is not None or index >= len(group.sequences):
            return
        sequence = group.sequences[index]
        if sequence.status.is_finished:
            return
        for scheduler in self._schedulers:
            if group in scheduler.running or group in scheduler.swapped or group.request_id in self.waiting:
                scheduler.finish_sequence(sequence, SequenceStatus.FINISHED_STOPPED)
                break
        else:  # it waits, and no worker is connected
            self.waiting.withdraw(group, SequenceStatus.FINISHED_STOPPED, index)
            self.recorder.withdrawn(group, SequenceStatus.FINISHED_STOPPED, index)
        self.wake()

    def abort(self, key: str) -> bool:
        """End a request; its stream closes with what it has. Returns whether the request exists.

        A request that is being checked ends after the check.
        """
        is_being_checked = self.admission.abort(key)
        call = self.requests.get(key)
        if call is None:
            return is_being_checked
        if self._finish(call, SequenceStatus.FINISHED_ABORTED):
            call.tell_standing()
            call.tell(aborted=pb.Aborted())
        return True

    def close(self, call: Call, finished: FinishedRequest | None = None) -> None:
        """The call is over: free everything that it still holds."""
        self.admission.release(call)
        if call.group is not None:
            self._leave(call)
            call.group.disband()
        if finished is not None:
            self.finished.add(finished)
        if call.adapter:
            self.adapters.released(call.adapter)
            if finished is not None:
                self.adapters.counts.add(call.lora_name, finished)
        if self._is_draining and not self._has_unfinished:
            self._is_empty.set()

    def _leave(self, call: Call) -> None:
        if self.requests.get(call.key) is call:
            del self.requests[call.key]
            self.traced.discard(call)
            if call.expiry is not None:
                call.expiry.cancel()
            self._finish(call, SequenceStatus.FINISHED_ABORTED)

    @property
    def _has_unfinished(self) -> bool:
        """Whether there are calls that were accepted and are not closed: requests, and calls of texts between two."""
        return bool(self.requests) or any(call.has_texts for call in self.admission.being_checked.values())

    def _supersede(self, later: Call, submission: pb.Submit) -> Call | None:
        """End what is left of the same request's broken stream, because another call goes on with it. Returns the
        stream's call, if there is one.

        The stream's memory counts until its call is closed: its client may have left a message unread.
        """
        call = self.requests.get(later.key)
        if call is None:
            return None
        assert call.group is not None
        encoder_input = call.group.encoder_input
        digest = b"" if encoder_input is None else encoder_input.digest
        ours = (call.adapter, pack(call.group.prompt_token_ids), digest)
        if ours != (later.adapter, submission.prompt_token_ids, submission.encoder_input.digest):
            raise RequestError(
                grpc.StatusCode.ALREADY_EXISTS,
                "request_id is in flight already, with another prompt or adapter; a request that resumes is sent again "
                "as it was",
            )
        self._leave(call)
        call.tell_error(_RESUMED, at_once=True)
        return call

    def _finish(self, call: Call, status: SequenceStatus) -> bool:
        group = call.group
        assert group is not None
        if group.is_finished:
            return False  # by itself, as most do: no scheduler need be asked
        ended = any(scheduler.finish_requests([group.request_id], status) for scheduler in self._schedulers)
        if not ended and group.request_id in self.waiting:  # and no worker is connected
            self.waiting.withdraw(group, status)
            self.recorder.withdrawn(group, status)
            ended = True
        self.wake()
        return ended

    def set_keys(self, keyring: Keyring) -> None:
        """Have calls from now on need one of these keys. Weights stay as they are while a recording is made."""
        self.keyring = keyring
        self.admission.quotas.set_keys(keyring, time.monotonic())
        if self.settings.record is None:
            self._weights.clear()
            self._weights.update(_tenant_weights(self.settings, keyring))

    @property
    def _schedulers(self) -> list[Scheduler]:
        return [worker.scheduler for worker in self.workers if worker.scheduler is not None]

    # ---- for adapters

    def fetchers(self, *, admitting: bool = False) -> list[AdapterFetcher]:
        """Of the workers that serve, or of those that take requests."""
        workers = [worker for worker in self.serving.values() if worker.admits or not admitting]
        return [worker.fetcher for worker in workers if worker.fetcher is not None]

    def uses_adapter(self, fingerprint: str) -> bool:
        """Whether a request in flight names it."""
        calls = itertools.chain(self.requests.values(), self.admission.being_checked.values())
        return any(call.adapter == fingerprint for call in calls)

    def fail_adapter(self, fingerprint: str, reason: str) -> None:
        """End the requests in flight that name it."""
        for call in [call for call in self.requests.values() if call.adapter == fingerprint]:
            self._finish(call, SequenceStatus.FINISHED_ABORTED)
            call.tell_error(RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason))

    # ---- for the service

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await self._members.run()
        finally:
            self.recorder.close()

    async def wait_for_model(self) -> pb.ModelLimits:
        """What the served model allows, however long it takes until a worker tells of it."""
        return await asyncio.shield(self._limits)

    def watch_health(self) -> AsyncIterator[bool]:
        """Whether requests are worth sending here, from the first worker on and whenever that changes."""
        return self._outage.watch_health()

    async def drain(self, grace: float) -> None:
        """Admit nothing more, wait until every call has been closed, and end those left after `grace` seconds.

        Requests that no worker can take are ended sooner: clients can go on with them at another scheduler.
        """
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await _first_of(self._until_empty(), self._absence.lasts(UNSERVED_SECONDS))
        self._is_over = True
        for call in self.requests.values():
            self._finish(call, SequenceStatus.FINISHED_ABORTED)
            call.tell_error(SHUTTING_DOWN)

    async def _until_empty(self) -> None:
        while self._has_unfinished:
            self._is_empty.clear()
            await self._is_empty.wait()

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

    def reset_prefix_cache(self) -> int:
        """Have no request find what was computed so far; those in flight go on. Returns the blocks that were found."""
        num_blocks = sum(scheduler.reset_prefix_cache() for scheduler in self._schedulers)
        log.info("prefix cache emptied by an operator", blocks=num_blocks)
        return num_blocks

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

    def connect(self, address: str) -> WorkerClient:
        """A channel to a worker, as the settings have it."""
        return WorkerClient(address, self._worker_tls, self.settings.worker_identity or "")

    async def accept(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Check that a worker serves what the others serve; the first one decides. Raises WorkerError."""
        if info.protocol_version != PROTOCOL_VERSION:
            raise WorkerError(f"the worker speaks protocol {info.protocol_version}, this scheduler {PROTOCOL_VERSION}")
        if info.model_id != self._model_name:
            raise WorkerError(f"the worker serves the model {info.model_id!r}, this scheduler {self._model_name!r}")
        if (num_blocks := info.num_device_blocks + info.num_host_blocks) > MAX_BLOCKS:
            raise WorkerError(f"the worker has {num_blocks} blocks; this scheduler manages at most {MAX_BLOCKS}")
        try:
            scheduler_config(self.settings, info)
        except ValueError as error:
            raise WorkerError(f"it cannot be scheduled: {error}") from None
        await self._learn_model(client, info)
        try:
            check_limits(self._limits.result(), self.settings, info)
        except ValueError as error:
            raise WorkerError(str(error)) from None

    async def _learn_model(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Have the model's files and limits from this worker, unless another one has told of them.

        One worker is asked, and another one as well where that takes long. Raises WorkerError.
        """
        with contextlib.suppress(TimeoutError):
            while not self._limits.done() and self._asked is not None:
                await asyncio.wait_for(self._asked.wait(), LONG_FETCH_SECONDS)
        if self._limits.done():
            return
        asked = self._asked = asyncio.Event()
        try:
            files = await client.fetch_tokenizer()
            if not self._limits.done():
                self.model_files = files
                self._limits.set_result(model_limits(self.settings, info))
        finally:
            asked.set()
            if self._asked is asked:
                self._asked = None

    def admitted(self, output: SchedulerOutput) -> None:
        """Take note of the requests that came to a worker with this step."""
        now = time.monotonic()
        for group in {new.sequence.group: None for new in output.new_sequences}:
            if (call := self.requests.get(group.request_id)) is None or call.group is not group:
                continue
            if call.queued_seconds is None:
                call.queued_seconds = now - group.arrived_at
                self.statistics.num_prompt_tokens += group.num_prompt_tokens
                self.statistics.num_cached_tokens += min(group.num_cached_tokens or 0, group.num_prompt_tokens)
            call.tell_standing()

    def swapped(self, groups: Sequence[SequenceGroup]) -> None:
        """Take note of requests that are swapped out."""
        for group in groups:
            if (call := self.requests.get(group.request_id)) is not None and call.group is group:
                call.tell_standing()

    def tell_traced(self) -> None:
        """Requests have come to a worker, were preempted, or have lost it."""
        for call in self.traced:
            call.tell_change()

    def publish(self, gained: Sequence[SequenceOutput]) -> None:
        """Bring what sequences gained to the front ends of their requests."""
        requests, running, num_tokens = self.requests, SequenceStatus.RUNNING, 0
        for item in gained:
            sequence, token_id, logprobs, prompt_logprobs, _, goes_on, _ = item
            group = sequence.group
            call = requests.get(group.request_id)
            if call is None or call.group is not group:
                continue
            if group.beams is not None and group.is_finished:
                num_tokens += sum(len(hypothesis.token_ids) for hypothesis in group.beams.hypotheses)
            num_tokens += token_id is not None
            has_more = not group.is_plain and (logprobs is not None or prompt_logprobs is not None)
            if token_id is None or has_more or (sequence.status is not running and not goes_on):
                call.tell_gained(item)
            else:
                call.outbox.outputs.append(call.first_output + sequence.index)
                call.outbox.token_ids.append(token_id)
        self.statistics.num_output_tokens += num_tokens
        for outbox in self.outboxes:
            if outbox.outputs:
                outbox.has_some.set()

    async def room(self) -> None:
        """Wait while front ends have too much to take."""
        for outbox in list(self.outboxes):
            if not outbox.has_room:
                await outbox.room()

    def fail(self, group: SequenceGroup) -> None:
        """End a request that the scheduler gave up on."""
        if call := self.requests.get(group.request_id):
            self._finish(call, SequenceStatus.FINISHED_ABORTED)
            is_ignored = any(sequence.status is SequenceStatus.FINISHED_IGNORED for sequence in group.sequences)
            code = grpc.StatusCode.INVALID_ARGUMENT if is_ignored else grpc.StatusCode.INTERNAL
            call.tell_error(RequestError(code, group.error or "the request could not be served"))

    def workers_changed(self) -> None:
        """A session began or ended, or a worker was drained or undrained.

        While no worker takes requests, waiting requests have limited time.
        """
        was_on = self._outage.is_on
        self._outage.set(not self.admits)
        self._absence.set(not self.serving)
        if self._outage.is_on != was_on:
            for call in self.requests.values():
                self._expire_later(call)
        self.adapters.settle()
        self.wake()

    # ---- waiting without a worker

    def _expire_later(self, call: Call) -> None:
        """Limit how long a request waits through this outage, if there is one."""
        if call.expiry is not None:
            call.expiry.cancel()
            call.expiry = None
        if self._outage.is_on:
            loop = asyncio.get_running_loop()
            call.expiry = loop.call_later(self._patience(call), self._expire, call)

    def _patience(self, call: Call) -> float:
        limit = self.settings.no_worker_timeout
        return limit if call.no_worker_timeout is None else min(limit, call.no_worker_timeout)

    def _expire(self, call: Call) -> None:
        if call.key not in self.waiting:
            self._expire_later(call)  # a worker that is drained computes it, and may yet give it back
            return
        self._finish(call, SequenceStatus.FINISHED_ABORTED)
        call.tell_error(self._unserved(self._patience(call)))

    def refuse_unserved(self, seconds: float) -> None:
        """Raises UNAVAILABLE, with why no worker has told of the model in so many seconds."""
        raise self._unserved(seconds)

    def _unserved(self, seconds: float) -> RequestError:
        reason = why_unserved(self.workers, self.settings.workers)
        if self.settings.api_keys is not None:  # addresses of workers are not for every caller
            reason = "an operator's watch says why"
        return RequestError(grpc.StatusCode.UNAVAILABLE, f"no worker took requests for {seconds:g} s: {reason}")


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Return when one has; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tenant_weights(settings: SchedulerSettings, keyring: Keyring | None) -> dict[str, float]:
    return {**settings.tenant_weights, **({} if keyring is None else keyring.weights)}


def _recorder(settings: SchedulerSettings, tenant_weights: Mapping[str, float]) -> NoRecorder:
    if settings.record is None:
        return NoRecorder()
    return Recorder(
        FileWriter(settings.record),
        policy=settings.policy,
        overtakes=settings.overtakes,
        tenant_weights=tenant_weights,
    )
