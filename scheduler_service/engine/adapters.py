"""Low-rank adapters by name: read from folders, handed to the workers, and kept until the last request of each is over.

A request is of an adapter's fingerprint from its admission on. So a name may come to mean another adapter, or none,
while requests of the old one still run, and are moved between workers.
"""

import asyncio
import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
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
NAME = re.compile(r"[\w.@:-]{1,128}")


@dataclass(frozen=True)
class Adapter:
    """A folder as PEFT writes it, and what was in it when it was read."""

    name: str
    folder: Path
    fingerprint: str
    num_bytes: int


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read all of it once. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:200]!r} cannot name an adapter: 1 to 128 letters, digits and . _ @ : -")
    try:
        config = _config(folder)
        with open(folder / WEIGHTS, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            num_bytes = file.tell()
    except OSError as error:
        raise ValueError(f"adapter {name}: cannot read {error.filename}: {error.strerror}") from None
    return Adapter(name, folder, hashlib.sha256(hashlib.sha256(config).digest() + digest).hexdigest(), num_bytes)


def _config(folder: Path) -> bytes:
    with open(folder / CONFIG, "rb") as file:
        config = file.read(MAX_CONFIG_BYTES + 1)
    if len(config) > MAX_CONFIG_BYTES:
        raise ValueError(f"{folder / CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
    return config


async def pieces_of(adapter: Adapter) -> AsyncIterator[worker_pb.TakeAdapterRequest]:
    """The messages that hand an adapter over. Raises OSError."""
    config = await asyncio.to_thread(_config, adapter.folder)
    yield worker_pb.TakeAdapterRequest(fingerprint=adapter.fingerprint, config=config)
    with open(adapter.folder / WEIGHTS, "rb") as file:  # noqa: ASYNC230  # a thread's would stay open when cancelled
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


class Users(Protocol):
    """What an adapter matters to."""

    def clients(self) -> Iterable[WorkerClient]:
        """Of the workers that serve."""

    def uses_adapter(self, fingerprint: str) -> bool:
        """Whether a request in flight names it."""

    def fail_adapter(self, fingerprint: str, reason: str) -> None:
        """End the requests in flight that name it."""


class Adapters:
    """Those that requests can name, and those that requests in flight still need."""

    def __init__(self, settings: SchedulerSettings, users: Users) -> None:
        """Reads the adapters that the settings name. Raises StartError."""
        self._folder = settings.lora_dir
        self._users = users
        self.counts = AdapterCounts()
        self._named: dict[str, Adapter] = {}
        self._leaving: dict[str, Adapter] = {}  # by fingerprint: no name leads to them any more
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            for name, folder in _configured(settings):
                if name in self._named:
                    raise ValueError(f"two adapters are named {name}")
                self._named[name] = read_adapter(name, folder)
        except (OSError, ValueError) as error:
            raise StartError(str(error)) from None

    @property
    def listed(self) -> list[Adapter]:
        """Those that requests can name."""
        return sorted(self._named.values(), key=lambda adapter: adapter.name)

    def find(self, name: str) -> str:
        """The fingerprint that a name leads to. Raises NOT_FOUND."""
        if (adapter := self._named.get(name)) is None:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"lora_name: there is no adapter {name!r}")
        return adapter.fingerprint

    # ---- for operators

    async def load(self, name: str) -> Adapter:
        """Have requests name an adapter of --lora-dir; one that is named so already goes, if it is another.

        Raises RequestError, also where a worker cannot use it; then nothing has changed.
        """
        if self._folder is None:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "the scheduler runs without --lora-dir")
        async with self._lock:
            try:
                adapter = await asyncio.to_thread(read_adapter, name, self._folder / name)
            except ValueError as error:
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
            self._leaving.pop(adapter.fingerprint, None)
            for client in self._users.clients():
                try:
                    await self._hand_over(client, adapter)
                except AdapterRefusedError as error:
                    self._leave(adapter)
                    raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"adapter {name}: {error}") from None
                except WorkerError:
                    continue  # it is handed over when the worker is back
            old = self._named.get(name)
            self._named[name] = adapter
            if old is not None:
                self._leave(old)
        log.info("adapter loaded", name=name, fingerprint=adapter.fingerprint, bytes=adapter.num_bytes)
        return adapter

    async def unload(self, name: str) -> None:
        """Have no more requests name an adapter; those in flight go on. Raises NOT_FOUND."""
        async with self._lock:
            self.find(name)
            self._leave(self._named.pop(name))
        log.info("adapter unloaded", name=name)

    def _leave(self, adapter: Adapter) -> None:
        if adapter.fingerprint not in {other.fingerprint for other in self._named.values()}:
            self._leaving[adapter.fingerprint] = adapter
            self.released(adapter.fingerprint)

    def released(self, fingerprint: str) -> None:
        """A request that named it is over: forget it if it was the last, and no name leads to it."""
        if fingerprint in self._leaving and not self._users.uses_adapter(fingerprint):
            del self._leaving[fingerprint]
            for client in self._users.clients():
                task = asyncio.create_task(_unload(client, fingerprint))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    # ---- for the worker loops

    async def bring_all(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Hand over what a worker lacks, and free what it need not have, before it serves. Raises WorkerError."""
        wanted = {adapter.fingerprint: adapter for adapter in (*self._named.values(), *self._leaving.values())}
        if wanted and not info.max_loras:
            raise WorkerError("the worker takes no adapters; start it with --max-loras, as this scheduler has adapters")
        client.adapters = set(info.adapters)
        for fingerprint in client.adapters - wanted.keys():
            await _unload(client, fingerprint)
        await self.bring(client, wanted)

    async def bring(self, client: WorkerClient, fingerprints: Iterable[str]) -> None:
        """Hand over those of these that a worker lacks. An adapter that it refuses is there no more."""
        for fingerprint in set(fingerprints) - client.adapters:
            adapter = self._by_fingerprint(fingerprint)
            if adapter is None:
                continue
            try:
                await self._hand_over(client, adapter)
            except AdapterRefusedError as error:
                self._break(adapter, str(error))

    def _by_fingerprint(self, fingerprint: str) -> Adapter | None:
        everything = (*self._named.values(), *self._leaving.values())
        return next((adapter for adapter in everything if adapter.fingerprint == fingerprint), None)

    async def _hand_over(self, client: WorkerClient, adapter: Adapter) -> None:
        """Raises WorkerError."""
        try:
            await client.load_adapter(adapter.fingerprint, pieces_of(adapter))
        except OSError as error:
            raise AdapterRefusedError(f"its files cannot be read any more: {error.strerror}") from None

    def _break(self, adapter: Adapter, reason: str) -> None:
        log.error("adapter refused by a worker", name=adapter.name, reason=reason)
        for name in [name for name, other in self._named.items() if other.fingerprint == adapter.fingerprint]:
            del self._named[name]
        self._leaving.pop(adapter.fingerprint, None)
        self._users.fail_adapter(adapter.fingerprint, f"the adapter {adapter.name} cannot be used: {reason}")


async def _unload(client: WorkerClient, fingerprint: str) -> None:
    with contextlib.suppress(UnreachableError):
        await client.unload_adapter(fingerprint)


def _configured(settings: SchedulerSettings) -> Sequence[tuple[str, Path]]:
    found = []
    for item in settings.lora:
        name, is_pair, folder = item.partition("=")
        if not is_pair:
            raise ValueError(f"--lora {item}: it must be NAME=FOLDER")
        found.append((name, Path(folder).expanduser()))
    if settings.lora_dir is not None:
        found += [(file.parent.name, file.parent) for file in sorted(settings.lora_dir.glob(f"*/{CONFIG}"))]
    return found
