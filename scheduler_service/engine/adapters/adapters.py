"""Loads and unloads adapters for operators, and gives up adapters that no worker can use."""

import asyncio
import weakref
from collections.abc import Callable, Sequence

import grpc
import structlog

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import Scheduler
from scheduler_service.engine.adapters.adapter_counts import AdapterCounts
from scheduler_service.engine.adapters.adapter_fetcher import AdapterFetcher
from scheduler_service.engine.adapters.adapter_files import Adapter, CopyLostError, hand_over
from scheduler_service.engine.adapters.catalogue import Catalogue
from scheduler_service.engine.calls.requests import Requests
from scheduler_service.engine.worker_link.client import (
    AdapterFailedError,
    AdapterRefusedError,
    WorkerClient,
    WorkerError,
)
from scheduler_service.engine.worker_link.limits import num_places
from scheduler_service.engine.workers.worker import Worker
from scheduler_service.engine.workers.workers import Workers
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import WorkerInfo

log = structlog.get_logger()

MAX_HELD = 4096
"""Maximum number of adapters that a worker may report as held before its session. The limit is needed because a faulty
worker may report any number.
"""


class Adapters:
    """Loads and unloads the adapters of `catalogue`, and gives up adapters that no worker can use.

    Fetchers send adapters to workers while steps run, as long as a worker has places for adapters.
    """

    def __init__(self, settings: SchedulerSettings, requests: Requests, workers: Workers) -> None:
        """Read the adapters that the settings name. Raises StartError."""
        self.catalogue = Catalogue(settings)
        self.counts = AdapterCounts()
        self.fetchers: list[AdapterFetcher] = []
        """The fetchers of open sessions."""
        self.when_changed: Callable[[], None] = lambda: None
        """Callback that is called when an adapter's name was added or removed."""
        self._requests = requests
        self._workers = workers
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by name

    # ---- calls of operators

    async def load(self, name: str) -> Adapter:
        """Let requests name an adapter of --lora-dir. The adapter replaces another adapter of the same name.

        Raises RequestError, for example if a worker cannot use the adapter. After a failed call, requests can name the
        same adapters as before.
        """
        catalogue, folder = self.catalogue, self.catalogue.folder_of(name)
        async with self._lock(name):
            reading = asyncio.ensure_future(asyncio.to_thread(catalogue.read, name, folder))
            try:
                adapter = (await asyncio.shield(reading)).kept()
            except ValueError as error:
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
            except asyncio.CancelledError:
                reading.add_done_callback(_discard)
                raise
            catalogue.loading[name] = adapter
            self._update()
            old = None
            try:
                await self._bring(adapter)
                old = catalogue.named.get(name)
                catalogue.named[name] = adapter
                self.when_changed()
            finally:  # also needed if the operator's call is cancelled
                del catalogue.loading[name]
                for one in (adapter, old):
                    if one is not None:
                        self._leave(one)
                self._update()
        log.info("adapter loaded", name=name, fingerprint=adapter.fingerprint, bytes=adapter.num_bytes)
        return adapter

    def _lock(self, name: str) -> asyncio.Lock:
        """The lock of an adapter's name. The lock makes operators' calls for the same name run one after the other."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _bring(self, adapter: Adapter) -> None:
        """Send the adapter to all serving workers that have a place for an adapter. Each worker checks whether it can
        use the adapter.

        Raises RequestError if a worker cannot use the adapter, or if no worker has a place.
        """
        fetchers = list(self.fetchers)
        taking = [fetcher.take(adapter.fingerprint) for fetcher in fetchers]
        found = await asyncio.gather(*taking, return_exceptions=True)
        for fetcher, result in zip(fetchers, found, strict=True):
            if isinstance(result, AdapterRefusedError):
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"adapter {adapter.name}: {result}")
            if isinstance(result, BaseException) and not isinstance(result, WorkerError):
                raise result
            if isinstance(result, WorkerError) and fetcher in self.fetchers:
                raise RequestError(grpc.StatusCode.UNAVAILABLE, f"adapter {adapter.name}: {result}; try again")
        if any(isinstance(result, WorkerError) for result in found) and True not in found:
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE, f"adapter {adapter.name}: the session with a worker has ended; try again"
            )
        if found and True not in found:
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE,
                f"adapter {adapter.name}: no worker has a place for it, as all of --max-cpu-loras are in use or being "
                "filled; try again",
            )

    async def unload(self, name: str) -> None:
        """Remove the name of an adapter. Requests in flight continue to use the adapter. Raises NOT_FOUND."""
        async with self._lock(name):
            self.catalogue.find(name)
            self._leave(self.catalogue.named.pop(name))
            self._update()
            self.when_changed()
        log.info("adapter unloaded", name=name)

    def _leave(self, adapter: Adapter) -> None:
        if not self.catalogue.is_named(adapter):
            self.catalogue.leaving[adapter.fingerprint] = adapter
            self.released(adapter.fingerprint)

    def released(self, fingerprint: str) -> None:
        """Called when a request of the adapter has ended. Remove the adapter's copy if no name and no other request
        refers to the adapter.
        """
        leaving = self.catalogue.leaving
        adapter = leaving.get(fingerprint)
        if adapter is None or self._requests.uses_adapter(fingerprint):
            return
        del leaving[fingerprint]
        self._update()
        if fingerprint not in self.catalogue.wanted:
            self._forget(adapter)

    def _forget(self, adapter: Adapter) -> None:
        adapter.weights.unlink(missing_ok=True)
        for fetcher in self.fetchers:
            fetcher.drop(adapter.fingerprint)

    def _update(self) -> None:
        self.catalogue.update()
        for fetcher in self.fetchers:
            fetcher.look_again()

    # ---- calls of the workers' sessions

    def begin(self, worker: Worker, scheduler: Scheduler, held: Sequence[str]) -> AdapterFetcher:
        """Create the fetcher of a new session. `held` are the adapters that the worker holds before the session. Call
        `end` after the session.
        """
        fetcher = AdapterFetcher(
            self.catalogue, worker.client, scheduler, worker.in_flight, worker.fetch_counts, self._fetched
        )
        fetcher.begin(held)
        self.fetchers.append(fetcher)
        return fetcher

    def end(self, fetcher: AdapterFetcher) -> None:
        """Called when the session of the fetcher has ended."""
        self.fetchers.remove(fetcher)

    async def check(self, client: WorkerClient, info: WorkerInfo) -> list[str]:
        """Check that a worker supports adapters before it serves. Before the worker serves, test it with the adapters
        that some other workers cannot use.

        Returns the fingerprints of the adapters that the worker holds, at most as many as the worker has places. Raises
        WorkerError.
        """
        if self.catalogue.wanted and not info.max_loras:
            raise WorkerError("the worker takes no adapters; start it with --max-loras, as this scheduler has adapters")
        held = list(info.adapters[: min(num_places(info), MAX_HELD)])
        for fingerprint in self.catalogue.contested - set(held):
            if len(held) >= num_places(info) or (adapter := self.catalogue.wanted.get(fingerprint)) is None:
                continue
            try:
                await hand_over(client, adapter)
            except AdapterRefusedError as error:
                raise _unfit(adapter, str(error)) from None
            except CopyLostError as error:
                self.give_up(adapter, str(error))
            except AdapterFailedError:  # the session will try to send this adapter again
                continue
            else:
                held.append(fingerprint)
        return held

    def _fetched(self) -> None:
        """Called when a worker has received an adapter, or cannot use an adapter."""
        self.settle()
        self._workers.wake()

    def settle(self) -> None:
        """Decide what happens to adapters that a worker cannot use.

        If another worker holds the adapter, the session of the refusing worker ends. If no worker that accepts requests
        can use the adapter, the adapter is given up. An adapter whose copy cannot be read any more is given up, too.
        """
        fetchers = self.fetchers
        for fetcher in fetchers:
            while fetcher.lost:
                self.give_up(*fetcher.lost.pop())
        for fingerprint, reason in {f: reason for fetcher in fetchers for f, reason in fetcher.refused.items()}.items():
            refusing = [fetcher for fetcher in fetchers if fingerprint in fetcher.refused]
            adapter = self.catalogue.wanted.get(fingerprint)
            if adapter is None:
                for fetcher in refusing:
                    fetcher.drop(fingerprint)
            elif any(fetcher.holds(fingerprint) for fetcher in fetchers):
                self.catalogue.contested.add(fingerprint)
                for fetcher in refusing:
                    fetcher.end(_unfit(adapter, fetcher.refused[fingerprint]))
            elif others := [fetcher for fetcher in fetchers if fetcher.admits and fetcher not in refusing]:
                for fetcher in others:
                    fetcher.attempt(fingerprint)
            else:
                self.give_up(adapter, reason)

    def give_up(self, adapter: Adapter, reason: str) -> None:
        """End the requests of an adapter that no worker can use, and remove its names."""
        log.error("adapter given up", name=adapter.name, reason=reason)
        self.catalogue.remove_names(adapter)
        self.catalogue.leaving.pop(adapter.fingerprint, None)
        self._update()
        reason = f"the adapter {adapter.name} cannot be used: {reason}"
        self._requests.end_all(RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason), adapter.fingerprint)
        # if the adapter is still wanted here, an operator is loading the same adapter again
        if adapter.fingerprint not in self.catalogue.wanted:
            self._forget(adapter)
        self.when_changed()


def _discard(reading: "asyncio.Future[Adapter]") -> None:
    """Remove the copy that was made for a cancelled call."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().weights.unlink(missing_ok=True)


def _unfit(adapter: Adapter, reason: str) -> WorkerError:
    return WorkerError(f"the worker cannot use the adapter {adapter.name}, as others do: {reason}")
