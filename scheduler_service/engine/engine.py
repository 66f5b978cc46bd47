"""The engine: one process that distributes requests to workers, and stores the adapters for workers."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import grpc

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_common.calls.errors import RequestError
from scheduler_service.access.keys import Keyring
from scheduler_service.core.queues.policy import waiting_queue
from scheduler_service.engine.adapters.adapters import Adapters
from scheduler_service.engine.calls.calls import Call
from scheduler_service.engine.calls.requests import Requests
from scheduler_service.engine.sessions.discovery import Resolve, resolve_by_dns
from scheduler_service.engine.sessions.membership import Membership
from scheduler_service.engine.sessions.worker_fleet import WorkerFleet
from scheduler_service.engine.workers.workers import UNSERVED_SECONDS, Workers
from scheduler_service.recording.recorder import NoRecorder, Recorder
from scheduler_service.recording.writer import FileWriter
from scheduler_service.settings import SchedulerSettings

SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


class Engine:
    """Accepts requests from front ends and computes them on the workers. Create the engine inside its event loop.

    `resolve` looks up the addresses of workers' host names. Raises StartError if a model file of the settings is
    missing, certificates are unusable, or the recording file exists already.
    """

    def __init__(
        self, settings: SchedulerSettings, resolve: Resolve = resolve_by_dns, keyring: Keyring | None = None
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        """The API keys that calls may use, or None if calls need no API key."""
        self.cache_secret = secrets.token_bytes(32)  # clients cannot predict keys of the prefix cache without it
        self.is_draining = False
        """Whether the server is shutting down. During a shutdown, further requests are refused."""
        self._is_over = False
        self._is_empty = asyncio.Event()
        self._weights = _tenant_weights(settings, keyring)
        self._recorder = _recorder(settings, self._weights)
        self.workers = Workers(settings.workers, settings.no_worker_timeout)
        waiting = waiting_queue(settings.scheduling_policy, settings.priority_aging, self._weights)
        self.requests = Requests(settings, waiting, self.workers, self._recorder, keyring)
        self.adapters = Adapters(settings, self.requests, self.workers)
        self.fleet = WorkerFleet(settings, self.workers, self.requests, self.adapters, self._recorder)
        self._members = Membership(self.fleet, resolve)

    # ---- for front ends

    def admit(self, call: Call, num_bytes: int, *, resumes: bool = False, adapter_name: str = "") -> None:
        """Admit a call: count it towards the limits on calls. In a flood of calls, excess calls are refused before the
        engine does any work.

        Raises UNAVAILABLE during a shutdown, RESOURCE_EXHAUSTED if a limit is reached, and ALREADY_EXISTS if a call
        with the same key is in flight. Raises NOT_FOUND for an unknown adapter, and INVALID_ARGUMENT for a request that
        never fits into memory.
        """
        if self.is_draining and call.key:
            raise SHUTTING_DOWN
        adapter = self.adapters.catalogue.find(adapter_name) if adapter_name else ""
        self.requests.admission.admit(call, num_bytes, resumes=resumes, now=time.monotonic())
        call.adapter_name, call.adapter_id = adapter_name, adapter

    def hold(self, call: Call, num_bytes: int) -> None:
        """Count further texts of an admitted call towards the memory limit. Raises RESOURCE_EXHAUSTED or
        INVALID_ARGUMENT if memory is lacking.
        """
        call.has_texts = True
        self.requests.admission.hold(call, num_bytes)

    def submit(self, call: Call, submission: pb.Submit) -> None:
        """Queue an admitted request, or a text of an admitted call.

        During a shutdown raises UNAVAILABLE: at once for a request, but only after the grace period for a text of an
        admitted embedding call. Raises ALREADY_EXISTS if the request resumes a request in flight that has a different
        prompt. Raises RESOURCE_EXHAUSTED or INVALID_ARGUMENT if memory is lacking.
        """
        if self.is_draining and (call.parent is None or self._is_over):
            raise SHUTTING_DOWN
        self.requests.admission.hold(call, submission.num_bytes)
        if call.adapter_id:
            self.adapters.catalogue.check_held(call.adapter_id)
        self.requests.queue(call, submission)

    def close(self, call: Call, finished: FinishedRequest | None = None) -> None:
        """Free the memory, the limits and the adapter that a finished call still holds. `finished` is the description
        of the request that operators can list.
        """
        self.requests.close(call, finished)
        if call.adapter_id:
            self.adapters.released(call.adapter_id)
            if finished is not None:
                self.adapters.counts.add(call.adapter_name, finished)
        if self.is_draining and not self.requests.has_unfinished:
            self._is_empty.set()

    # ---- for the service

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await self._members.run()
        finally:
            self._recorder.close()

    def set_keys(self, keyring: Keyring) -> None:
        """Require one of these API keys from now on. Except during a recording, the weights of tenants in the fair
        queue are also replaced.
        """
        self.keyring = keyring
        self.requests.admission.quotas.set_keys(keyring, time.monotonic())
        if self.settings.record is None:
            self._weights.clear()
            self._weights.update(_tenant_weights(self.settings, keyring))

    async def drain(self, grace: float) -> None:
        """Refuse further requests, and wait until every call is closed. After `grace` seconds, end the remaining calls.

        If no worker is connected for UNSERVED_SECONDS, the remaining calls end at once. Clients can resume their
        requests at another scheduler.
        """
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await _first_of(self._until_empty(), self.workers.absence.lasts(UNSERVED_SECONDS))
        self._is_over = True
        self.requests.end_all(SHUTTING_DOWN)

    async def _until_empty(self) -> None:
        while self.requests.has_unfinished:
            self._is_empty.clear()
            await self._is_empty.wait()


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines until one has returned, and cancel the rest."""
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
        policy=settings.scheduling_policy,
        overtakes=settings.priority_aging,
        tenant_weights=tenant_weights,
    )
