"""Low-rank adapters by name: read from folders, handed to the workers, and kept until the last request of each is over.

A request is of an adapter's fingerprint from its admission on. So a name may come to mean another adapter, or none,
while requests of the old one still run, and are moved between workers.
"""

import asyncio
import contextlib
import hashlib
import re
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import structlog

from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_common.errors import RequestError
from pagewire_common.start_error import StartError
from scheduler_service.engine.worker_client import AdapterRefusedError, UnreachableError, WorkerClient, WorkerError
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import WorkerInfo

log = structlog.get_logger()

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
MOST_COUNTED = 64
OTHERS = "(others)"
NAME = re.compile(r"(?!\.+$)[\w.@:-]{1,128}")


@dataclass(frozen=True)
class Adapter:
    """A copy of a folder as PEFT writes it: what happens to the folder does not matter to requests in flight."""

    name: str
    fingerprint: str
    config: bytes
    weights: Path
    num_bytes: int


def read_adapter(name: str, folder: Path, copies: Path) -> Adapter:
    """Copy it into a folder of copies. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:200]!r} cannot name an adapter: 1 to 128 letters, digits and . _ @ : -")
    try:
        with open(folder / CONFIG, "rb") as file:
            config = file.read(MAX_CONFIG_BYTES + 1)
        if len(config) > MAX_CONFIG_BYTES:
            raise ValueError(f"adapter {name}: {CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
        with open(folder / WEIGHTS, "rb") as source, tempfile.NamedTemporaryFile(dir=copies, delete=False) as copy:
            digest = hashlib.sha256()
            while data := source.read(PIECE_BYTES):
                digest.update(data)
                copy.write(data)
    except OSError as error:
        raise ValueError(f"adapter {name}: cannot read {error.filename}: {error.strerror}") from None
    fingerprint = hashlib.sha256(hashlib.sha256(config).digest() + digest.digest()).hexdigest()
    weights = Path(copy.name).replace(copies / fingerprint)
    return Adapter(name, fingerprint, config, weights, weights.stat().st_size)


async def hand_over(client: WorkerClient, adapter: Adapter) -> None:
    """Raises AdapterRefusedError where the worker cannot use it, and UnreachableError."""
    try:
        await client.load_adapter(adapter.fingerprint, _pieces_of(adapter))
    except OSError as error:
        raise UnreachableError(f"the copy of the adapter {adapter.name} cannot be read: {error.strerror}") from None


async def _pieces_of(adapter: Adapter) -> AsyncIterator[worker_pb.TakeAdapterRequest]:
    yield worker_pb.TakeAdapterRequest(fingerprint=adapter.fingerprint, config=adapter.config)
    with open(adapter.weights, "rb") as file:  # noqa: ASYNC230  # a thread's would stay open when cancelled
        while data := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield worker_pb.TakeAdapterRequest(data=data)


class AdapterCounts:
    """Requests that are over, and tokens of theirs, by the names of adapters. After the first ones, further names are
    counted together: each is a label for ever."""

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


class Holder(Protocol):
    """A worker that serves."""

    client: WorkerClient

    def drop_adapter(self, fingerprint: str) -> None:
        """Have it forget an adapter once the steps that it has been sent are answered."""


class Users(Protocol):
    """What an adapter matters to."""

    def holders(self) -> Sequence[Holder]:
        """The workers that serve."""

    def uses_adapter(self, fingerprint: str) -> bool:
        """Whether a request in flight names it."""

    def fail_adapter(self, fingerprint: str, reason: str) -> None:
        """End the requests in flight that name it."""


class Adapters:
    """Those that requests can name, those that are being handed to the workers, and those that requests in flight still
    need. A worker that serves holds all of them."""

    def __init__(self, settings: SchedulerSettings, users: Users) -> None:
        """Reads the adapters that the settings name. Raises StartError."""
        self._folder = settings.lora_dir.expanduser() if settings.lora_dir is not None else None
        self._users = users
        self.when_changed: Callable[[], None] = lambda: None
        """Called after others can be named than before."""
        self.counts = AdapterCounts()
        self._copies: Path | None = None
        self._named: dict[str, Adapter] = {}
        self._loading: dict[str, Adapter] = {}  # by fingerprint, as the next
        self._leaving: dict[str, Adapter] = {}  # no name leads to them any more
        self._lock = asyncio.Lock()
        try:
            for name, folder in _configured(settings.lora, self._folder):
                if name in self._named:
                    raise ValueError(f"two adapters are named {name}")
                self._named[name] = read_adapter(name, folder, self._place())
        except ValueError as error:
            raise StartError(str(error)) from None

    @property
    def are_served(self) -> bool:
        """Whether requests can name any, now or once one is loaded."""
        return bool(self._named) or self._folder is not None

    @property
    def listed(self) -> list[Adapter]:
        """Those that requests can name."""
        return sorted(self._named.values(), key=lambda adapter: adapter.name)

    @property
    def _wanted(self) -> dict[str, Adapter]:
        """All that a worker must hold, by fingerprint."""
        return self._leaving | self._loading | {adapter.fingerprint: adapter for adapter in self._named.values()}

    def find(self, name: str) -> str:
        """The fingerprint that a name leads to. Raises NOT_FOUND."""
        if (adapter := self._named.get(name)) is None:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"lora_name: there is no adapter {name!r}")
        return adapter.fingerprint

    def check_held(self, fingerprint: str) -> None:
        """Raises FAILED_PRECONDITION for an adapter that has turned out to be of no use since it was found."""
        if fingerprint not in self._wanted:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "lora_name: the adapter cannot be used any more")

    # ---- for operators

    async def load(self, name: str) -> Adapter:
        """Have requests name an adapter of --lora-dir; one that is named so already goes, if it is another.

        Raises RequestError, also where a worker cannot use it; then nothing has changed.
        """
        if self._folder is None:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "the scheduler runs without --lora-dir")
        folder = self._folder / name
        async with self._lock:
            try:
                adapter = await asyncio.to_thread(lambda: read_adapter(name, folder, self._place()))
            except ValueError as error:
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
            self._loading[adapter.fingerprint] = adapter
            old = None
            try:
                handing = [self._hand_over(holder, adapter) for holder in self._users.holders()]
                for failure in await asyncio.gather(*handing, return_exceptions=True):
                    if failure is not None:
                        raise failure
                old = self._named.get(name)
                self._named[name] = adapter
                self.when_changed()
            finally:  # also when the call is cancelled
                self._loading.pop(adapter.fingerprint, None)
                for one in (adapter, old):
                    if one is not None:
                        self._leave(one)
        log.info("adapter loaded", name=name, fingerprint=adapter.fingerprint, bytes=adapter.num_bytes)
        return adapter

    def _place(self) -> Path:
        """Where copies are kept until this object is gone. Raises ValueError."""
        if self._copies is None:
            try:
                self._copies = Path(tempfile.mkdtemp(prefix="pagewire-adapters-"))
            except OSError as error:
                raise ValueError(f"there is no folder for temporary files to copy adapters to: {error}") from None
            weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)
        return self._copies

    async def _hand_over(self, holder: Holder, adapter: Adapter) -> None:
        """Raises RequestError where a worker that goes on serving does not hold it."""
        try:
            await hand_over(holder.client, adapter)
        except AdapterRefusedError as error:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"adapter {adapter.name}: {error}") from None
        except WorkerError as error:
            if holder in self._users.holders():
                raise RequestError(
                    grpc.StatusCode.UNAVAILABLE, f"adapter {adapter.name}: {holder.client.address}: {error}; try again"
                ) from None

    async def unload(self, name: str) -> None:
        """Have no more requests name an adapter; those in flight go on. Raises NOT_FOUND."""
        async with self._lock:
            self.find(name)
            self._leave(self._named.pop(name))
            self.when_changed()
        log.info("adapter unloaded", name=name)

    def _leave(self, adapter: Adapter) -> None:
        if adapter.fingerprint not in {other.fingerprint for other in self._named.values()}:
            self._leaving[adapter.fingerprint] = adapter
            self.released(adapter.fingerprint)

    def released(self, fingerprint: str) -> None:
        """A request that named it is over: forget it if it was the last, and no name leads to it."""
        adapter = self._leaving.get(fingerprint)
        if adapter is None or self._users.uses_adapter(fingerprint):
            return
        del self._leaving[fingerprint]
        if fingerprint not in self._wanted:
            adapter.weights.unlink(missing_ok=True)
            for holder in self._users.holders():
                holder.drop_adapter(fingerprint)

    # ---- for the worker loops

    async def bring_all(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Hand over what a worker lacks, before it serves. Raises WorkerError.

        When it returns, the worker holds all that is wanted at that moment. What it holds besides is freed only where
        there is no room: another scheduler may serve with it.
        """
        if self._wanted and not info.max_loras:
            raise WorkerError("the worker takes no adapters; start it with --max-loras, as this scheduler has adapters")
        client.adapters = set(info.adapters)
        while lacking := self._wanted.keys() - client.adapters:
            adapter = self._wanted[next(iter(lacking))]
            try:
                await hand_over(client, adapter)
            except AdapterRefusedError as error:
                if others := client.adapters - self._wanted.keys():
                    for fingerprint in others:
                        await client.unload_adapter(fingerprint)
                    continue
                if any(adapter.fingerprint in holder.client.adapters for holder in self._users.holders()):
                    raise WorkerError(
                        f"the worker cannot use the adapter {adapter.name}, as others do: {error}"
                    ) from None
                self._break(adapter, str(error))

    async def forget(self, client: WorkerClient, fingerprint: str) -> None:
        """Have a worker forget an adapter, unless it is wanted again."""
        with contextlib.suppress(UnreachableError):
            async with client.changing_adapters:
                if fingerprint not in self._wanted:
                    await client.unload_adapter(fingerprint)

    def _break(self, adapter: Adapter, reason: str) -> None:
        """It is of no use to the only worker there is."""
        log.error("adapter refused by a worker", name=adapter.name, reason=reason)
        for name in [name for name, other in self._named.items() if other.fingerprint == adapter.fingerprint]:
            del self._named[name]
        self._leaving.pop(adapter.fingerprint, None)
        self._loading.pop(adapter.fingerprint, None)
        adapter.weights.unlink(missing_ok=True)
        self._users.fail_adapter(adapter.fingerprint, f"the adapter {adapter.name} cannot be used: {reason}")


def _configured(named: Sequence[str], folder: Path | None) -> Sequence[tuple[str, Path]]:
    """Raises ValueError."""
    found = []
    for item in named:
        name, is_pair, place = item.partition("=")
        if not is_pair:
            raise ValueError(f"--lora {item}: it must be NAME=FOLDER")
        found.append((name, Path(place).expanduser()))
    if folder is not None:
        if not folder.is_dir():
            raise ValueError(f"--lora-dir: there is no folder {folder}")
        found += [(file.parent.name, file.parent) for file in sorted(folder.glob(f"*/{CONFIG}"))]
    return found
