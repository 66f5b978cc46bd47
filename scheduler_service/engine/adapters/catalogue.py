"""The adapters of a scheduler and their copies.

An admitted request names its adapter by fingerprint, so the public name may change or go while the request runs and
moves between workers.
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
"""Seconds of a delivery to one worker before the next worker gets the adapter too."""


@dataclass(slots=True, eq=False)
class Delivery:
    """A fetcher's delivery; `since` in seconds of `time.monotonic`."""

    fingerprint: str = ""
    since: float = 0.0


class Catalogue:
    """Call `update` after a change of `named`, `loading` or `leaving`."""

    def __init__(self, settings: SchedulerSettings) -> None:
        """Raises StartError."""
        self._folder = settings.lora_dir.expanduser() if settings.lora_dir is not None else None
        self._copies: TemporaryFolder | None = None
        self.named: dict[str, Adapter] = {}
        """Adapters with names, by name."""
        self.loading: dict[str, Adapter] = {}
        """Adapters of operators' calls under way, by name."""
        self.leaving: dict[str, Adapter] = {}
        """Adapters that have no name and are needed by requests in flight, by fingerprint."""
        self.wanted: dict[str, Adapter] = {}
        """All adapters above, by fingerprint: only these are sent to workers."""
        self.fingerprints: list[str] = []
        """Fingerprints of adapters with names."""
        self.contested: set[str] = set()
        """Fingerprints that one worker could use and another could not."""
        self.deliveries: set[Delivery] = set()
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
        """Whether requests can name adapters, now or after an operator's call."""
        return bool(self.named) or self._folder is not None

    @property
    def listed(self) -> list[Adapter]:
        return sorted(self.named.values(), key=lambda adapter: adapter.name)

    def find(self, name: str) -> str:
        """Returns the fingerprint. Raises NOT_FOUND."""
        if (adapter := self.named.get(name)) is None:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"lora_name: there is no adapter {name!r}")
        return adapter.fingerprint

    def check_held(self, fingerprint: str) -> None:
        """Raise FAILED_PRECONDITION for an adapter given up after the request's admission."""
        if fingerprint not in self.wanted:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "lora_name: the adapter cannot be used any more")

    def folder_of(self, name: str) -> Path:
        """Raises FAILED_PRECONDITION without --lora-dir."""
        if self._folder is None:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "the scheduler runs without --lora-dir")
        return self._folder / name

    def read(self, name: str, folder: Path) -> Adapter:
        """Raises ValueError."""
        return read_adapter(name, folder, self._place())

    def _place(self) -> Path:
        """The folder for copies, until this object is garbage-collected. Raises ValueError."""
        if self._copies is None:
            try:
                self._copies = TemporaryFolder("adapters")
            except OSError as error:
                raise ValueError(f"there is no folder for temporary files to copy adapters to: {error}") from None
            weakref.finalize(self, self._copies.close)
        return self._copies.path

    def is_named(self, adapter: Adapter) -> bool:
        return any(other.fingerprint == adapter.fingerprint for other in self.named.values())

    def remove_names(self, adapter: Adapter) -> None:
        self.named = {name: other for name, other in self.named.items() if other.fingerprint != adapter.fingerprint}

    def update(self) -> None:
        named, loading = (
            {adapter.fingerprint: adapter for adapter in adapters.values()} for adapters in (self.named, self.loading)
        )
        self.wanted = self.leaving | loading | named
        self.fingerprints = list(named)
        self.contested &= self.wanted.keys()

    def may_be_brought(self, fingerprint: str) -> bool:
        """Whether a worker that lacks an adapter gets it: one worker at a time, unless the delivery is slow."""
        since = time.monotonic() - LONG_FETCH_SECONDS
        is_on_its_way = any(one.fingerprint == fingerprint and one.since > since for one in self.deliveries)
        return fingerprint in self.wanted and not is_on_its_way
