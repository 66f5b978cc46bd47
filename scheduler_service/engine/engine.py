"""Connects the parts of the engine, and is its interface for front ends and the service."""

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
from scheduler_service.engine.adapters.adapters import Adapters
from scheduler_service.engine.calls.calls import Call
from scheduler_service.engine.calls.requests import Requests
from scheduler_service.engine.sessions.discovery import Resolve, resolve_by_dns
from scheduler_service.engine.sessions.membership import Membership
from scheduler_service.engine.sessions.worker_fleet import WorkerFleet
from scheduler_service.engine.workers import UNSERVED_SECONDS, Workers
from scheduler_service.policies import waiting_queue
from scheduler_service.recording.recorder import Recorder
from scheduler_service.recording.writer import FileWriter
from scheduler_service.settings import SchedulerSettings

SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


class Engine:
    """Create the engine inside its event loop. `resolve` looks up host names of workers.

    Raises StartError for a missing model file, unusable certificates, or a recording file that exists.
    """

    def __init__(
        self, settings: SchedulerSettings, resolve: Resolve = resolve_by_dns, keyring: Keyring | None = None
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        """None if calls need no API key."""
        self.cache_secret = secrets.token_bytes(32)  # clients cannot predict keys of the prefix cache without it
        self.is_draining = False
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

    def admit(
        self,
        call: Call,
        num_bytes: int,
        *,
        resumes: bool = False,
        restores: bool = False,
        adapter_name: str = "",
        adapter_id: str = "",
    ) -> None:
        """Count a call towards the limits, before any work. No limit refuses a call that `restores`, with the
        `adapter_id` that it was given before.

        Raises UNAVAILABLE during a shutdown, RESOURCE_EXHAUSTED at a limit, ALREADY_EXISTS for a key in flight,
        NOT_FOUND for an unknown adapter, FAILED_PRECONDITION for one with other weights than before, INVALID_ARGUMENT
        for a request that never fits into memory.
        """
        if self.is_draining and call.key:
            raise SHUTTING_DOWN
        adapter = self.adapters.catalogue.find(adapter_name) if adapter_name else ""
        if adapter_id not in ("", adapter):
            reason = f"lora_name: the adapter {adapter_name!r} has other weights since the engine's restart"
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason)
        call.is_restored = restores
        self.requests.admission.admit(call, num_bytes, resumes=resumes, now=time.monotonic())
        call.adapter_name, call.adapter_id = adapter_name, adapter

    def hold(self, call: Call, num_bytes: int) -> None:
        """Count further memory of an admitted call. Raises RESOURCE_EXHAUSTED or INVALID_ARGUMENT without memory."""
        call.has_texts, call.is_restored = True, False
        self.requests.admission.hold(call, num_bytes)

    def submit(self, call: Call, submission: pb.Submit) -> None:
        """Queue an admitted request, or a text of an admitted call.

        Raises UNAVAILABLE during a shutdown, for a text only after the grace period, and the errors of `Requests.queue`
        and `hold`.
        """
        if self.is_draining and (call.parent is None or self._is_over):
            raise SHUTTING_DOWN
        if call.parent is not None:
            call.parent.has_texts = True
        self.requests.admission.hold(call, submission.num_bytes)
        if call.adapter_id:
            self.adapters.catalogue.check_held(call.adapter_id)
        self.requests.queue(call, submission)

    def close(self, call: Call, finished: FinishedRequest | None = None) -> None:
        """Free everything that a finished call holds. `finished` describes the request to operators."""
        self.requests.close(call, finished)
        if call.adapter_id:
            self.adapters.released(call.adapter_id)
            if finished is not None:
                self.adapters.counts.add(call.adapter_name, finished)
        if self.is_draining and not self.requests.has_unfinished:
            self._is_empty.set()

    # ---- for the service

    async def run(self) -> None:
        try:
            await self._members.run()
        finally:
            if self._recorder is not None:
                self._recorder.close()

    def set_keys(self, keyring: Keyring) -> None:
        """A recording keeps its weights of tenants."""
        self.keyring = keyring
        self.requests.admission.quotas.set_keys(keyring, time.monotonic())
        if self.settings.record is None:
            self._weights.clear()
            self._weights.update(_tenant_weights(self.settings, keyring))

    async def drain(self, grace: float) -> None:
        """Refuse further requests, and end the rest after `grace` seconds or UNSERVED_SECONDS without a worker. Clients
        can resume at another scheduler.
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
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tenant_weights(settings: SchedulerSettings, keyring: Keyring | None) -> dict[str, float]:
    return {**settings.tenant_weights, **({} if keyring is None else keyring.weights)}


def _recorder(settings: SchedulerSettings, tenant_weights: Mapping[str, float]) -> Recorder | None:
    if settings.record is None:
        return None
    return Recorder(
        FileWriter(settings.record),
        policy=settings.scheduling_policy,
        overtakes=settings.priority_aging,
        tenant_weights=tenant_weights,
    )
