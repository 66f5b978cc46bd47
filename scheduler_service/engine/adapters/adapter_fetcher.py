"""Sends adapters to one worker, one after the other, while the worker runs steps. The fetcher also removes adapters
from the worker.

The session's scheduler chooses the next adapter, and the adapter that the worker removes to make room. Adapters that an
operator loads are sent first, then adapters that waiting requests need and the worker lacks. Other adapters that
requests can name are sent while the worker has free places. An adapter is removed after the worker has answered the
steps in flight. A failed delivery is retried with growing pauses. While an adapter is sent, its requests wait and other
requests continue.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import structlog

from scheduler_service.core import Scheduler, SchedulerOutput
from scheduler_service.core.planning.adapters import AdapterFetch
from scheduler_service.engine.adapters.adapter_files import Adapter, CopyLostError, hand_over
from scheduler_service.engine.adapters.catalogue import LONG_FETCH_SECONDS, Catalogue, Delivery
from scheduler_service.engine.worker_link.client import (
    AdapterFailedError,
    AdapterRefusedError,
    UnreachableError,
    WorkerClient,
    WorkerError,
)
from scheduler_service.engine.workers.fetch_counts import FetchCounts

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


class AdapterFetcher:
    """Sends adapters to the worker of one session. `in_flight` contains the steps that were sent to the worker and are
    not answered.

    `fetched` is called when the worker has received an adapter, or when an adapter was `refused` or `lost`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        client: WorkerClient,
        scheduler: Scheduler,
        in_flight: Sequence[SchedulerOutput],
        counts: FetchCounts,
        fetched: Callable[[], None],
    ) -> None:
        self._catalogue = catalogue
        self._client = client
        self._scheduler = scheduler
        self._in_flight = in_flight
        self._counts = counts
        self._fetched = fetched
        self._delivery = Delivery()
        self.refused: dict[str, str] = {}
        """The reasons why the worker cannot use an adapter, by the adapter's fingerprint."""
        self.lost: list[tuple[Adapter, str]] = []
        """Adapters whose copies cannot be read, with the reason. An adapter stays in this list until `Adapters` gives
        it up.
        """
        self._lacking: Sequence[str] = ()
        # For each adapter that an operator loads, the future for which the operator's call waits.
        self._asked: dict[str, asyncio.Future[bool]] = {}
        self._to_try: dict[str, None] = {}  # Adapters that another worker cannot use.
        self._retries: dict[
            str, tuple[float, float]
        ] = {}  # After a failed delivery, by fingerprint: time of the next attempt, and length of the pause.
        self._to_forget: deque[str] = deque()
        self._handing: asyncio.Future[None] | None = None
        self._failure: WorkerError | None = None
        self._is_over = False
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()

    @property
    def fetching(self) -> str:
        """The fingerprint of the adapter being sent; empty if no adapter is being sent."""
        return self._delivery.fingerprint

    @property
    def admits(self) -> bool:
        """Whether the worker of this session accepts requests."""
        return self._scheduler.admits

    def begin(self, held: Iterable[str]) -> None:
        """Record the adapters that the worker held before the session. The worker then removes the held adapters that
        the catalogue does not want.
        """
        wanted = self._catalogue.wanted
        for fingerprint in held:
            if fingerprint in wanted:
                self._scheduler.hold_adapter(fingerprint)
            else:
                self._to_forget.append(fingerprint)

    def holds(self, fingerprint: str) -> bool:
        """Whether the worker holds an adapter."""
        return self._scheduler.adapters.holds(fingerprint)

    def look_again(self) -> None:
        """React to a change of `catalogue.wanted`: cancel the delivery of an unwanted adapter, and wake `run`."""
        if self._handing is not None and self.fetching not in self._catalogue.wanted:
            self._handing.cancel()
        self._wake.set()

    def lack(self, fingerprints: Sequence[str]) -> None:
        """Set the adapters that waiting requests need and this worker lacks."""
        if fingerprints or self._lacking:
            self._lacking = fingerprints
            self._wake.set()

    async def take(self, fingerprint: str) -> bool:
        """Send a wanted adapter to the worker. Returns true as soon as the worker holds the adapter, and false if all
        places of the worker are in use.

        Raises AdapterRefusedError, and UnreachableError if the session ends during the delivery.
        """
        if self._is_over:
            raise _over()
        if not self._scheduler.config.max_held_loras:
            raise AdapterRefusedError("the worker takes no adapters; start it with --max-loras")
        if self.holds(fingerprint):
            return True
        future = self._asked.setdefault(fingerprint, asyncio.get_running_loop().create_future())
        self._wake.set()
        return await asyncio.shield(future)

    def attempt(self, fingerprint: str) -> None:
        """Send an adapter as a test whether the worker can use the adapter, as soon as the worker has a free place."""
        if fingerprint not in self._to_try:
            self._to_try[fingerprint] = None
            self._wake.set()

    def drop(self, fingerprint: str) -> None:
        """Have the worker remove an adapter that no request needs."""
        self.refused.pop(fingerprint, None)
        self._retries.pop(fingerprint, None)
        self._to_try.pop(fingerprint, None)
        if self._scheduler.drop_adapter(fingerprint):
            self._to_forget.append(fingerprint)
            self._wake.set()

    def end(self, failure: WorkerError) -> None:
        """Called at the session's end: end deliveries, and fail the calls of operators that wait for an adapter."""
        self._failure = failure
        if self._handing is not None:
            self._handing.cancel()
        self._wake.set()

    def step_answered(self) -> None:
        self._answered.set()

    async def run(self) -> None:
        """Serve until cancelled. Raises WorkerError if the worker must no longer be used."""
        self._catalogue.deliveries.add(self._delivery)
        try:
            while True:
                self._wake.clear()
                if self._failure is not None:
                    raise self._failure
                if self._to_forget:
                    await self._forget(self._to_forget.popleft())
                elif (fetch := self._next()) is not None:
                    await self._bring(fetch)
                else:
                    for fingerprint in list(self._asked):
                        # the worker either holds the adapter by now, or has no free place for an adapter
                        self._answer(fingerprint, self.holds(fingerprint))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._pause()):
                            await self._wake.wait()
        finally:
            self._catalogue.deliveries.discard(self._delivery)
            self._is_over = True
            for future in self._asked.values():
                future.set_exception(_over())
                future.exception()  # asyncio warns of an exception that is never read

    def _next(self) -> AdapterFetch | None:
        now = time.monotonic()

        def may_be_tried(fingerprint: str) -> bool:
            return fingerprint not in self.refused and self._retries.get(fingerprint, (0.0,))[0] <= now

        may_be_brought = self._catalogue.may_be_brought
        wanted = [*self._to_try, *(one for one in self._lacking if may_be_brought(one))]
        preloads = filter(may_be_tried, self._catalogue.fingerprints)
        return self._scheduler.begin_fetch([*self._asked, *filter(may_be_tried, wanted)], preloads)

    def _pause(self) -> float | None:
        """Seconds after which `run` looks for the next adapter to send, even if nothing has changed."""
        now = time.monotonic()
        # A retry that is already due waits for a free place in the worker, not for a time.
        pauses = [again_at - now for again_at, _ in self._retries.values() if again_at > now]
        if any(one not in self.refused and one not in self._retries for one in self._lacking):
            pauses.append(LONG_FETCH_SECONDS)  # the adapter is perhaps being sent to another worker first
        return min(pauses, default=None)

    def _answer(self, fingerprint: str, result: bool | WorkerError) -> bool:
        """If an operator waits for an adapter, report the result to the operator. Returns whether an operator waits for
        the adapter.
        """
        future = self._asked.pop(fingerprint, None)
        if future is None:
            return False
        if isinstance(result, WorkerError):
            future.set_exception(result)
            future.exception()  # marks the exception as read: the operator's call may be gone
        else:
            future.set_result(result)
        return True

    async def _bring(self, fetch: AdapterFetch) -> None:
        fingerprint, seconds = fetch.adapter_id, None
        self._delivery.fingerprint, self._delivery.since = fingerprint, time.monotonic()
        try:
            if fetch.dropped:
                await self._forget(fetch.dropped)
            seconds = await self._hand_over(fingerprint)
            self.refused.pop(fingerprint, None)
            self._retries.pop(fingerprint, None)
        except AdapterRefusedError as error:
            if not self._answer(fingerprint, error):
                self.refused[fingerprint] = str(error)
        except AdapterFailedError as error:
            self._retry_later(fingerprint, str(error))
            self._answer(fingerprint, error)
        finally:
            self._delivery.fingerprint = ""
            self._to_try.pop(fingerprint, None)
            self._scheduler.end_fetch(seconds)
        self._answer(fingerprint, seconds is not None)
        if fingerprint not in self._catalogue.wanted:
            self.drop(fingerprint)  # the adapter was unloaded during the delivery
        self._fetched()

    def _retry_later(self, fingerprint: str, reason: str) -> None:
        pause = min(LAST_RETRY_SECONDS, 2 * self._retries.get(fingerprint, (0.0, FIRST_RETRY_SECONDS / 2))[1])
        self._retries[fingerprint] = time.monotonic() + pause, pause
        self._to_forget.append(fingerprint)  # a failed delivery may still have reached the worker
        log.warning("adapter not taken", worker=self._client.address, fingerprint=fingerprint, reason=reason)

    async def _hand_over(self, fingerprint: str) -> float | None:
        """Send an adapter. Returns the seconds of the delivery, or None if the adapter is no longer wanted."""
        adapter = self._catalogue.wanted.get(fingerprint)
        if adapter is None:
            return None
        began = time.monotonic()
        self._handing = asyncio.ensure_future(hand_over(self._client, adapter))
        try:
            await self._handing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._failure is not None:
                raise self._failure from None
            self._to_forget.append(fingerprint)  # the delivery was cancelled, but the worker may hold the adapter
            return None
        except CopyLostError as error:
            self._to_forget.append(fingerprint)
            if fingerprint in self._catalogue.wanted:
                self.lost.append((adapter, str(error)))
            return None
        finally:
            self._handing = None
        seconds = time.monotonic() - began
        self._counts.num_adapters += 1
        self._counts.num_bytes += adapter.num_bytes
        self._counts.seconds += seconds
        return seconds

    async def _forget(self, fingerprint: str) -> None:
        """Have the worker remove an adapter, after the worker has answered every step in flight."""
        last = self._in_flight[-1].step_id if self._in_flight else 0
        while self._in_flight and self._in_flight[0].step_id <= last:
            self._answered.clear()
            await self._answered.wait()
        await self._client.unload_adapter(fingerprint)


def _over() -> UnreachableError:
    return UnreachableError("the session with the worker has ended")
