"""Operators' loading and unloading of adapters, and the end of adapters that no worker can use."""

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
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.errors import AdapterFailedError, AdapterRefusedError, WorkerError
from scheduler_service.engine.worker_link.limits import num_places
from scheduler_service.engine.workers import Worker, Workers
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import WorkerInfo

log = structlog.get_logger()

MAX_HELD = 4096
"""Adapters that a faulty worker may report before its session."""


class Adapters:
    def __init__(self, settings: SchedulerSettings, requests: Requests, workers: Workers) -> None:
        """Raises StartError."""
        self.catalogue = Catalogue(settings)
        self.counts = AdapterCounts()
        self.fetchers: list[AdapterFetcher] = []
        self.when_changed: Callable[[], None] = lambda: None
        """Called when an adapter's name was added or removed."""
        self._requests = requests
        self._workers = workers
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by name

    # ---- calls of operators

    async def load(self, name: str) -> Adapter:
        """Let requests name an adapter of --lora-dir, in place of another of that name. After RequestError, all names
        stay.
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
        """Makes operators' calls for one name run one after the other."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _bring(self, adapter: Adapter) -> None:
        """Raises RequestError if a worker cannot use the adapter, or no worker has a place."""
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
        """Remove a name; requests in flight keep the adapter. Raises NOT_FOUND."""
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
        """Remove an adapter's copy after its last request, if it has no name."""
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
        """The fetcher of a new session, until `end`. `held`: adapters on the worker before the session."""
        fetcher = AdapterFetcher(self.catalogue, worker, scheduler, self._fetched)
        fetcher.begin(held)
        self.fetchers.append(fetcher)
        return fetcher

    def end(self, fetcher: AdapterFetcher) -> None:
        self.fetchers.remove(fetcher)

    async def check(self, client: WorkerClient, info: WorkerInfo) -> list[str]:
        """Test a worker, before it serves, with adapters that some workers cannot use. Raises WorkerError.

        Returns fingerprints on the worker, at most as many as its places.
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
        self.settle()
        self._workers.wake()

    def settle(self) -> None:
        """If another worker holds a refused adapter, the refusing worker's session ends. If no worker can use an
        adapter, or its copy is unreadable, the adapter is given up.
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
        """End the requests and the names of an adapter that no worker can use."""
        log.error("adapter given up", name=adapter.name, reason=reason)
        self.catalogue.remove_names(adapter)
        self.catalogue.leaving.pop(adapter.fingerprint, None)
        self._update()
        reason = f"the adapter {adapter.name} cannot be used: {reason}"
        self._requests.end_all(RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason), adapter.fingerprint)
        # if still wanted, an operator is loading the same adapter again
        if adapter.fingerprint not in self.catalogue.wanted:
            self._forget(adapter)
        self.when_changed()


def _discard(reading: "asyncio.Future[Adapter]") -> None:
    if not reading.cancelled() and reading.exception() is None:
        reading.result().weights.unlink(missing_ok=True)


def _unfit(adapter: Adapter, reason: str) -> WorkerError:
    return WorkerError(f"the worker cannot use the adapter {adapter.name}, which other workers use: {reason}")
