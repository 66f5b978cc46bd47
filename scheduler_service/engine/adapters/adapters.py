"""Low-rank adapters by name: read from folders, handed to the workers, and kept until the last request of each is over.

From its admission on, a request refers to its adapter by fingerprint. So a name may come to mean another adapter, or
none, while requests of the old adapter still run and move between workers.
"""

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import grpc
import structlog

from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_common.calls.errors import RequestError
from pagewire_common.processes.temporary import TemporaryFolder
from pagewire_common.start_error import StartError
from scheduler_service.engine.adapters.adapter_fetcher import LONG_FETCH_SECONDS, AdapterFetcher
from scheduler_service.engine.adapters.adapter_files import (
    Adapter,
    CopyLostError,
    configured_folders,
    hand_over,
    read_adapter,
)
from scheduler_service.engine.worker_link.client import (
    AdapterFailedError,
    AdapterRefusedError,
    WorkerClient,
    WorkerError,
)
from scheduler_service.engine.worker_link.limits import num_places
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import WorkerInfo

log = structlog.get_logger()

MOST_COUNTED = 64
MOST_HELD = 4096
"""Most adapters that a worker is believed to hold before its session: its report may be false."""
OTHERS = "(others)"


class AdapterCounts:
    """Finished requests and their tokens, by the name of the adapter. Names after the first MOST_COUNTED are counted
    together, because each name stays a label for ever."""

    def __init__(self) -> None:
        self.num_requests: Counter[str] = Counter()
        self.num_prompt_tokens: Counter[str] = Counter()
        self.num_output_tokens: Counter[str] = Counter()

    def add(self, name: str, finished: FinishedRequest) -> None:
        if name not in self.num_requests and len(self.num_requests) >= MOST_COUNTED:
            name = OTHERS
        self.num_requests[name] += 1
        self.num_prompt_tokens[name] += finished.prompt_tokens
        self.num_output_tokens[name] += finished.output_tokens


class Users(Protocol):
    """The workers and requests that use adapters."""

    def fetchers(self, *, admitting: bool = False) -> Sequence[AdapterFetcher]:
        """The fetchers of the workers that serve or, if `admitting`, of the workers that take requests."""

    def wake(self) -> None:
        """Have every worker look whether there is something to send."""

    def uses_adapter(self, fingerprint: str) -> bool:
        """Whether a request in flight names it."""

    def fail_adapter(self, fingerprint: str, reason: str) -> None:
        """End the requests in flight that name it."""


class Adapters:
    """All adapters: those that requests can name, that are being loaded, or that requests in flight still need.

    They are sent to workers beside steps, as far as a worker has places for them; see adapter_fetcher.py.
    """

    def __init__(self, settings: SchedulerSettings, users: Users) -> None:
        """Reads the adapters that the settings name. Raises StartError."""
        self._folder = settings.lora_dir.expanduser() if settings.lora_dir is not None else None
        self._users = users
        self.when_changed: Callable[[], None] = lambda: None
        """Called after the adapters that requests can name have changed."""
        self.counts = AdapterCounts()
        self._copies: TemporaryFolder | None = None
        self._named: dict[str, Adapter] = {}
        self._loading: dict[str, Adapter] = {}  # by name
        self._leaving: dict[str, Adapter] = {}  # by fingerprint: no name leads to them any more
        self._wanted: dict[str, Adapter] = {}  # named, loading and leaving adapters, by fingerprint
        self._fingerprints: list[str] = []  # of the named adapters
        self._contested: set[str] = set()  # fingerprints that one worker could not use, and others could
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by name
        try:
            for name, folder in configured_folders(settings.lora_modules, self._folder):
                if name in self._named:
                    raise ValueError(f"two adapters are named {name}")
                self._named[name] = read_adapter(name, folder, self._place()).kept()
        except ValueError as error:
            raise StartError(str(error)) from None
        self._update()

    @property
    def are_served(self) -> bool:
        """Whether requests can name any, now or once one is loaded."""
        return bool(self._named) or self._folder is not None

    @property
    def listed(self) -> list[Adapter]:
        """The adapters that requests can name."""
        return sorted(self._named.values(), key=lambda adapter: adapter.name)

    def find(self, name: str) -> str:
        """The fingerprint that a name leads to. Raises NOT_FOUND."""
        if (adapter := self._named.get(name)) is None:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"lora_name: there is no adapter {name!r}")
        return adapter.fingerprint

    def check_held(self, fingerprint: str) -> None:
        """Raises FAILED_PRECONDITION for an adapter that was given up after the request found it."""
        if fingerprint not in self._wanted:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "lora_name: the adapter cannot be used any more")

    # ---- for operators

    async def load(self, name: str) -> Adapter:
        """Let requests name an adapter of --lora-dir. It replaces another adapter of that name.

        Raises RequestError, also if a worker cannot use the adapter; then nothing has changed.
        """
        if self._folder is None:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "the scheduler runs without --lora-dir")
        folder = self._folder / name
        async with self._lock(name):
            reading = asyncio.ensure_future(asyncio.to_thread(lambda: read_adapter(name, folder, self._place())))
            try:
                adapter = (await asyncio.shield(reading)).kept()
            except ValueError as error:
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
            except asyncio.CancelledError:
                reading.add_done_callback(_discard)
                raise
            self._loading[name] = adapter
            self._update()
            old = None
            try:
                await self._bring(adapter)
                old = self._named.get(name)
                self._named[name] = adapter
                self.when_changed()
            finally:  # also when the call is cancelled
                del self._loading[name]
                for one in (adapter, old):
                    if one is not None:
                        self._leave(one)
                self._update()
        log.info("adapter loaded", name=name, fingerprint=adapter.fingerprint, bytes=adapter.num_bytes)
        return adapter

    def _lock(self, name: str) -> asyncio.Lock:
        """Operators' calls for one name wait for each other."""
        return self._locks.setdefault(name, asyncio.Lock())

    def _place(self) -> Path:
        """Where copies are kept until this object is gone. Raises ValueError."""
        if self._copies is None:
            try:
                self._copies = TemporaryFolder("adapters")
            except OSError as error:
                raise ValueError(f"there is no folder for temporary files to copy adapters to: {error}") from None
            weakref.finalize(self, self._copies.close)
        return self._copies.path

    async def _bring(self, adapter: Adapter) -> None:
        """Send the adapter to all serving workers that have a place for it; each checks it.

        Raises RequestError if a worker cannot use the adapter, or if no worker has a place.
        """
        fetchers = self._users.fetchers()
        taking = [fetcher.take(adapter.fingerprint) for fetcher in fetchers]
        found = await asyncio.gather(*taking, return_exceptions=True)
        for fetcher, result in zip(fetchers, found, strict=True):
            if isinstance(result, AdapterRefusedError):
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"adapter {adapter.name}: {result}")
            if isinstance(result, BaseException) and not isinstance(result, WorkerError):
                raise result
            if isinstance(result, WorkerError) and fetcher in self._users.fetchers():
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
        """Remove the name of an adapter; requests in flight go on. Raises NOT_FOUND."""
        async with self._lock(name):
            self.find(name)
            self._leave(self._named.pop(name))
            self._update()
            self.when_changed()
        log.info("adapter unloaded", name=name)

    def _leave(self, adapter: Adapter) -> None:
        if adapter.fingerprint not in {other.fingerprint for other in self._named.values()}:
            self._leaving[adapter.fingerprint] = adapter
            self.released(adapter.fingerprint)

    def released(self, fingerprint: str) -> None:
        """Called when a request of the adapter has ended: forget the adapter if no name and no other request needs
        it."""
        adapter = self._leaving.get(fingerprint)
        if adapter is None or self._users.uses_adapter(fingerprint):
            return
        del self._leaving[fingerprint]
        self._update()
        if fingerprint not in self._wanted:
            self._forget(adapter)

    def _forget(self, adapter: Adapter) -> None:
        adapter.weights.unlink(missing_ok=True)
        for fetcher in self._users.fetchers():
            fetcher.drop(adapter.fingerprint)

    def _update(self) -> None:
        named, loading = (
            {adapter.fingerprint: adapter for adapter in adapters.values()} for adapters in (self._named, self._loading)
        )
        self._wanted = self._leaving | loading | named
        self._fingerprints = list(named)
        self._contested &= self._wanted.keys()
        for fetcher in self._users.fetchers():
            fetcher.look_again()

    # ---- for the workers' sessions

    @property
    def wanted(self) -> Mapping[str, Adapter]:
        """The adapters that a worker may be sent, by fingerprint: named, loading, or needed by requests in flight."""
        return self._wanted

    @property
    def named(self) -> Sequence[str]:
        """The fingerprints of the adapters that requests can name."""
        return self._fingerprints

    async def check(self, client: WorkerClient, info: WorkerInfo) -> list[str]:
        """Before a worker serves, check that it takes adapters, and send it the adapters that not every worker can use.

        Returns the fingerprints that it holds, at most as many as it has places. Raises WorkerError.
        """
        if self._wanted and not info.max_loras:
            raise WorkerError("the worker takes no adapters; start it with --max-loras, as this scheduler has adapters")
        held = list(info.adapters[: min(num_places(info), MOST_HELD)])
        for fingerprint in self._contested - set(held):
            if len(held) >= num_places(info) or (adapter := self._wanted.get(fingerprint)) is None:
                continue
            try:
                await hand_over(client, adapter)
            except AdapterRefusedError as error:
                raise _unfit(adapter, str(error)) from None
            except CopyLostError as error:
                self.give_up(adapter, str(error))
            except AdapterFailedError:  # it is tried again in the session
                continue
            else:
                held.append(fingerprint)
        return held

    def may_be_brought(self, fingerprint: str) -> bool:
        """Whether a worker that lacks an adapter should be sent it. Only one worker at a time is, because one may be
        enough; the next worker follows if the first takes long."""
        since = time.monotonic() - LONG_FETCH_SECONDS
        fetchers = self._users.fetchers()
        is_on_its_way = any(one.fetching == fingerprint and one.fetching_since > since for one in fetchers)
        return fingerprint in self._wanted and not is_on_its_way

    def fetched(self) -> None:
        """Called when a worker has got an adapter, or has turned out to be unable to use it."""
        self.settle()
        self._users.wake()

    def settle(self) -> None:
        """Decide about adapters that a worker cannot use. If another worker can use the adapter, the worker's session
        ends; if no worker that takes requests can, the adapter is given up."""
        fetchers = self._users.fetchers()
        for fingerprint, reason in {f: reason for fetcher in fetchers for f, reason in fetcher.refused.items()}.items():
            refusing = [fetcher for fetcher in fetchers if fingerprint in fetcher.refused]
            adapter = self._wanted.get(fingerprint)
            if adapter is None:
                for fetcher in refusing:
                    fetcher.drop(fingerprint)
            elif any(fetcher.holds(fingerprint) for fetcher in fetchers):
                self._contested.add(fingerprint)
                for fetcher in refusing:
                    fetcher.end(_unfit(adapter, fetcher.refused[fingerprint]))
            elif others := [fetcher for fetcher in self._users.fetchers(admitting=True) if fetcher not in refusing]:
                for fetcher in others:
                    fetcher.attempt(fingerprint)
            else:
                self.give_up(adapter, reason)

    def give_up(self, adapter: Adapter, reason: str) -> None:
        """End the requests of an adapter that no worker can use, and remove its names."""
        log.error("adapter given up", name=adapter.name, reason=reason)
        for name in [name for name, other in self._named.items() if other.fingerprint == adapter.fingerprint]:
            del self._named[name]
        self._leaving.pop(adapter.fingerprint, None)
        self._update()
        self._users.fail_adapter(adapter.fingerprint, f"the adapter {adapter.name} cannot be used: {reason}")
        if adapter.fingerprint not in self._wanted:  # else it is being loaded anew
            self._forget(adapter)
        self.when_changed()


def _discard(reading: "asyncio.Future[Adapter]") -> None:
    """Remove the copy that was made for a call that is cancelled."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().weights.unlink(missing_ok=True)


def _unfit(adapter: Adapter, reason: str) -> WorkerError:
    return WorkerError(f"the worker cannot use the adapter {adapter.name}, as others do: {reason}")
