"""Sends adapters to one worker, one at a time, and removes adapters, while steps run.

The scheduler chooses the adapters: first the operators', then those of waiting requests, then others while places are
free. A removal waits for the steps in flight. A failed delivery is retried with growing pauses.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import structlog

from scheduler_service.core import Scheduler
from scheduler_service.core.planning.adapters import AdapterFetch
from scheduler_service.engine.adapters.adapter_files import Adapter, CopyLostError, hand_over
from scheduler_service.engine.adapters.catalogue import LONG_FETCH_SECONDS, Catalogue, Delivery
from scheduler_service.engine.worker_link.errors import (
    AdapterFailedError,
    AdapterRefusedError,
    UnreachableError,
    WorkerError,
)
from scheduler_service.engine.workers import Worker

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


class AdapterFetcher:
    """Sends adapters to one session's worker. `fetched` is called when an adapter was received, `refused` or `lost`."""

    def __init__(
        self,
        catalogue: Catalogue,
        worker: Worker,
        scheduler: Scheduler,
        fetched: Callable[[], None],
    ) -> None:
        self._catalogue = catalogue
        self._worker = worker
        self._scheduler = scheduler
        self._fetched = fetched
        self._delivery = Delivery()
        self.refused: dict[str, str] = {}
        """Reasons, by fingerprint."""
        self.lost: list[tuple[Adapter, str]] = []
        """Adapters with unreadable copies, and the reason, until `Adapters` gives them up."""
        self.lacking: Sequence[str] = ()
        # Operators' calls that wait, by fingerprint.
        self._asked: dict[str, asyncio.Future[bool]] = {}
        self._to_try: dict[str, None] = {}  # another worker cannot use them
        # By fingerprint: time of the next attempt, and length of the pause.
        self._retries: dict[str, tuple[float, float]] = {}
        self._to_forget: deque[str] = deque()
        self._handing: asyncio.Future[None] | None = None
        self._failure: WorkerError | None = None
        self._is_over = False
        self._wake = asyncio.Event()

    @property
    def fetching(self) -> str:
        return self._delivery.fingerprint

    @property
    def admits(self) -> bool:
        return self._scheduler.admits

    def begin(self, held: Iterable[str]) -> None:
        """Record the worker's adapters from before the session, and remove the unwanted ones."""
        wanted = self._catalogue.wanted
        for fingerprint in held:
            if fingerprint in wanted:
                self._scheduler.hold_adapter(fingerprint)
            else:
                self._to_forget.append(fingerprint)

    def holds(self, fingerprint: str) -> bool:
        return self._scheduler.adapters.holds(fingerprint)

    def look_again(self) -> None:
        if self._handing is not None and self.fetching not in self._catalogue.wanted:
            self._handing.cancel()
        self._wake.set()

    def lack(self, fingerprints: Sequence[str]) -> None:
        self.lacking = fingerprints
        self._wake.set()

    async def take(self, fingerprint: str) -> bool:
        """Send a wanted adapter. Returns False if all places of the worker are in use.

        Raises AdapterRefusedError, and UnreachableError if the session ends.
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
        """Test whether the worker can use an adapter, as soon as a place is free."""
        if fingerprint not in self._to_try:
            self._to_try[fingerprint] = None
            self._wake.set()

    def drop(self, fingerprint: str) -> None:
        """Remove an adapter that no request needs."""
        self.refused.pop(fingerprint, None)
        self._retries.pop(fingerprint, None)
        self._to_try.pop(fingerprint, None)
        if self._scheduler.drop_adapter(fingerprint):
            self._to_forget.append(fingerprint)
            self._wake.set()

    def end(self, failure: WorkerError) -> None:
        """End deliveries and the operators' calls that wait."""
        self._failure = failure
        if self._handing is not None:
            self._handing.cancel()
        self._wake.set()

    async def run(self) -> None:
        """Raises WorkerError if the worker must no longer be used."""
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
        wanted = [*self._to_try, *(one for one in self.lacking if may_be_brought(one))]
        preloads = filter(may_be_tried, self._catalogue.fingerprints)
        return self._scheduler.begin_fetch([*self._asked, *filter(may_be_tried, wanted)], preloads)

    def _pause(self) -> float | None:
        """Seconds until the next look for an adapter, even if nothing changes."""
        now = time.monotonic()
        # A due retry waits for a free place, not for a time.
        pauses = [again_at - now for again_at, _ in self._retries.values() if again_at > now]
        if any(one not in self.refused and one not in self._retries for one in self.lacking):
            pauses.append(LONG_FETCH_SECONDS)  # perhaps sent to another worker first
        return min(pauses, default=None)

    def _answer(self, fingerprint: str, result: bool | WorkerError) -> bool:
        """Returns whether an operator waits for the adapter."""
        future = self._asked.pop(fingerprint, None)
        if future is None:
            return False
        if isinstance(result, WorkerError):
            future.set_exception(result)
            future.exception()  # marked as read: the operator's call may be gone
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
        log.warning("adapter not taken", worker=self._worker.client.address, fingerprint=fingerprint, reason=reason)

    async def _hand_over(self, fingerprint: str) -> float | None:
        """Seconds of the delivery, or None if the adapter is no longer wanted."""
        adapter = self._catalogue.wanted.get(fingerprint)
        if adapter is None:
            return None
        began = time.monotonic()
        self._handing = asyncio.ensure_future(hand_over(self._worker.client, adapter))
        try:
            await self._handing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._failure is not None:
                raise self._failure from None
            self._to_forget.append(fingerprint)  # the worker may hold a cancelled adapter
            return None
        except CopyLostError as error:
            self._to_forget.append(fingerprint)
            if fingerprint in self._catalogue.wanted:
                self.lost.append((adapter, str(error)))
            return None
        finally:
            self._handing = None
        seconds = time.monotonic() - began
        counts = self._worker.fetch_counts
        counts.num_adapters += 1
        counts.num_bytes += adapter.num_bytes
        counts.seconds += seconds
        return seconds

    async def _forget(self, fingerprint: str) -> None:
        """Remove an adapter after the steps in flight."""
        worker, in_flight = self._worker, self._worker.in_flight
        last = in_flight[-1].step_id if in_flight else 0
        while in_flight and in_flight[0].step_id <= last:
            worker.answered.clear()
            await worker.answered.wait()
        await self._worker.client.unload_adapter(fingerprint)


def _over() -> UnreachableError:
    return UnreachableError("the session with the worker has ended")
