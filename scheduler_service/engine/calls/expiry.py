"""Limits how long requests wait while no worker takes requests."""

import asyncio
from collections.abc import Callable

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import WaitingQueue
from scheduler_service.engine.calls.calls import Call
from scheduler_service.engine.workers.workers import Workers
from scheduler_service.settings import SchedulerSettings


class Expiry:
    """Runs a timer for each request during an outage, in which no worker takes requests.

    The `end` function ends a request with an error.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        workers: Workers,
        waiting: WaitingQueue,
        end: Callable[[Call, RequestError], None],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._waiting = waiting
        self._end = end

    def limit(self, call: Call) -> None:
        """Start the request's timer if there is an outage. The request's earlier timer is cancelled."""
        if call.expiry is not None:
            call.expiry.cancel()
            call.expiry = None
        if self._workers.outage.is_on:
            loop = asyncio.get_running_loop()
            call.expiry = loop.call_later(self._patience(call), self._expire, call)

    def _patience(self, call: Call) -> float:
        limit = self._settings.no_worker_timeout
        return limit if call.no_worker_timeout is None else min(limit, call.no_worker_timeout)

    def _expire(self, call: Call) -> None:
        if call.key in self._waiting:
            self._end(call, self.unserved(self._patience(call)))
        else:  # a draining worker computes the request, and may still return the request to the queue
            self.limit(call)

    def unserved(self, seconds: float) -> RequestError:
        """Return an UNAVAILABLE error with the reason why no worker took requests for `seconds`."""
        reason = self._workers.why_unserved()
        if self._settings.api_keys is not None:  # callers with API keys must not see workers' addresses
            reason = "an operator's watch says why"
        return RequestError(grpc.StatusCode.UNAVAILABLE, f"no worker took requests for {seconds:g} s: {reason}")
