"""The adapters of a scheduler and their copies. An adapter has a name, is being loaded, or is needed by requests in
flight.

An admitted request refers to its adapter by fingerprint. A name can therefore change to another adapter while requests
of the old adapter still run and move between workers. A name can even be removed while requests of its adapter run.
"""

import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire_common.calls.errors import RequestError
from pagewire_common.processes.temporary import TemporaryFolder
from pagewire_common.start_error import StartError
from scheduler_service.engine.adapters.adapter_files import Adapter, configured_folders, read_adapter
from scheduler_service.settings import SchedulerSettings

LONG_FETCH_SECONDS = 5.0
"""Seconds of a delivery to one worker, after which the same adapter is also sent to another worker."""


@dataclass(slots=True, eq=False)
class Delivery:
    """The adapter that a fetcher is sending to its worker, and the start of this delivery in seconds of
    `time.monotonic`.
    """

    fingerprint: str = ""
    since: float = 0.0


class Catalogue:
    """All adapters of a scheduler. Call `update` after a change of `named`, `loading` or `leaving`."""

    def __init__(self, settings: SchedulerSettings) -> None:
        """Read the adapters that the settings name. Raises StartError."""
        self._folder = settings.lora_dir.expanduser() if settings.lora_dir is not None else None
        self._copies: TemporaryFolder | None = None
        self.named: dict[str, Adapter] = {}
        """Adapters that requests can name, by name."""
        self.loading: dict[str, Adapter] = {}
        """Adapters that an operator is loading, by name."""
        self.leaving: dict[str, Adapter] = {}
        """Adapters without a name that requests in flight need, by fingerprint."""
        self.wanted: dict[str, Adapter] = {}
        """All adapters in `named`, `loading` and `leaving`, by fingerprint. Only the adapters in this dictionary are
        sent to workers.
        """
        self.fingerprints: list[str] = []
        """Fingerprints of the adapters that requests can name."""
        self.contested: set[str] = set()
        """Fingerprints of the adapters that one worker could use and another worker could not."""
        self.deliveries: set[Delivery] = set()
        """Deliveries of open sessions."""
        try:
            for name, folder in configured_folders(settings.lora_modules, self._folder):
                if name in self.named:
                    raise ValueError(f"two adapters are named {name}")
                self.named[name] = self.read(name, folder).kept()
        except ValueError as error:
            raise StartError(str(error)) from None
        self.update()

    @property
    def are_served(self) -> bool:
        """Whether requests can name adapters, at once or after an operator has loaded an adapter."""
        return bool(self.named) or self._folder is not None

    @property
    def listed(self) -> list[Adapter]:
        """The adapters that requests can name."""
        return sorted(self.named.values(), key=lambda adapter: adapter.name)

    def find(self, name: str) -> str:
        """The fingerprint of the adapter with the given name. Raises NOT_FOUND."""
        if (adapter := self.named.get(name)) is None:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"lora_name: there is no adapter {name!r}")
        return adapter.fingerprint

    def check_held(self, fingerprint: str) -> None:
        """Raise FAILED_PRECONDITION if the adapter was given up after the request was admitted."""
        if fingerprint not in self.wanted:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "lora_name: the adapter cannot be used any more")

    def folder_of(self, name: str) -> Path:
        """The folder from which an adapter is loaded. Raises FAILED_PRECONDITION."""
        if self._folder is None:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "the scheduler runs without --lora-dir")
        return self._folder / name

    def read(self, name: str, folder: Path) -> Adapter:
        """Copy an adapter into a new folder. Raises ValueError."""
        return read_adapter(name, folder, self._place())

    def _place(self) -> Path:
        """The temporary folder for copies of adapters. The folder is removed when this object is garbage-collected.
        Raises ValueError.
        """
        if self._copies is None:
            try:
                self._copies = TemporaryFolder("adapters")
            except OSError as error:
                raise ValueError(f"there is no folder for temporary files to copy adapters to: {error}") from None
            weakref.finalize(self, self._copies.close)
        return self._copies.path

    def is_named(self, adapter: Adapter) -> bool:
        """Whether a name refers to the adapter."""
        return any(other.fingerprint == adapter.fingerprint for other in self.named.values())

    def remove_names(self, adapter: Adapter) -> None:
        """Remove the names that refer to the adapter."""
        self.named = {name: other for name, other in self.named.items() if other.fingerprint != adapter.fingerprint}

    def update(self) -> None:
        """Recompute `wanted`, and remove the other adapters' fingerprints from `contested`."""
        named, loading = (
            {adapter.fingerprint: adapter for adapter in adapters.values()} for adapters in (self.named, self.loading)
        )
        self.wanted = self.leaving | loading | named
        self.fingerprints = list(named)
        self.contested &= self.wanted.keys()

    def may_be_brought(self, fingerprint: str) -> bool:
        """Whether to send an adapter to a worker that lacks it.

        An adapter is sent to one worker at a time, because one worker may be enough for its requests. If the delivery
        to one worker is slow, the adapter is also sent to the next worker.
        """
        since = time.monotonic() - LONG_FETCH_SECONDS
        is_on_its_way = any(one.fingerprint == fingerprint and one.since > since for one in self.deliveries)
        return fingerprint in self.wanted and not is_on_its_way
