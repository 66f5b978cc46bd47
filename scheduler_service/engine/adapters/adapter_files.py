"""Copies an adapter's files from PEFT's folder, and sends the copy to a worker."""

import asyncio
import hashlib
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service.engine.worker_link.client import WorkerClient

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
NAME = re.compile(r"(?!\.+$)[\w.@:-]{1,128}")


class CopyLostError(Exception):
    """An adapter's copy cannot be read."""


@dataclass(frozen=True)
class Adapter:
    """A copy of an adapter's folder; changes of the folder do not affect requests in flight."""

    name: str
    fingerprint: str
    config: bytes
    weights: Path
    num_bytes: int

    def kept(self) -> "Adapter":
        """The adapter, moved to a path that equal copies share."""
        return replace(self, weights=self.weights.replace(self.weights.with_name(self.fingerprint)))


def read_adapter(name: str, folder: Path, copies: Path) -> Adapter:
    """Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:200]!r} cannot name an adapter: 1 to 128 letters, digits and . _ @ : -")
    try:
        with open(folder / CONFIG, "rb") as file:
            config = file.read(MAX_CONFIG_BYTES + 1)
        if len(config) > MAX_CONFIG_BYTES:
            raise ValueError(f"adapter {name}: {CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
        with open(folder / WEIGHTS, "rb") as source, tempfile.NamedTemporaryFile(dir=copies, delete=False) as copy:
            weights = Path(copy.name)
            try:
                digest = hashlib.sha256()
                while data := source.read(PIECE_BYTES):
                    digest.update(data)
                    copy.write(data)
                copy.flush()
            except OSError:
                weights.unlink()
                raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and (folder / PICKLE).exists():
            raise ValueError(
                f"adapter {name}: its weights are a pickle, {PICKLE}, which can run code when it is read; save it as "
                f"{WEIGHTS} with peft: model.save_pretrained(folder, safe_serialization=True)"
            ) from None
        raise ValueError(f"adapter {name}: cannot read {error.filename}: {error.strerror}") from None
    fingerprint = hashlib.sha256(hashlib.sha256(config).digest() + digest.digest()).hexdigest()
    return Adapter(name, fingerprint, config, weights, weights.stat().st_size)


async def hand_over(client: WorkerClient, adapter: Adapter) -> None:
    """Raises CopyLostError, and the errors of `WorkerClient.load_adapter`."""
    try:
        await client.load_adapter(_pieces_of(adapter))
    except OSError as error:
        raise CopyLostError(f"the scheduler's copy of it cannot be read: {error.strerror}") from None


async def _pieces_of(adapter: Adapter) -> AsyncIterator[worker_pb.TakeAdapterRequest]:
    yield worker_pb.TakeAdapterRequest(fingerprint=adapter.fingerprint, config=adapter.config)
    with open(adapter.weights, "rb") as file:  # noqa: ASYNC230  # a thread's file would stay open after a cancellation
        while data := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield worker_pb.TakeAdapterRequest(data=data)


def configured_folders(named: Sequence[str], folder: Path | None) -> Sequence[tuple[str, Path]]:
    """Names and folders from --lora-modules and --lora-dir. Raises ValueError."""
    found = []
    for item in named:
        name, is_pair, place = item.partition("=")
        if not is_pair:
            raise ValueError(f"--lora-modules {item}: it must be NAME=FOLDER")
        found.append((name, Path(place).expanduser()))
    if folder is not None:
        if not folder.is_dir():
            raise ValueError(f"--lora-dir: there is no folder {folder}")
        found += [(file.parent.name, file.parent) for file in sorted(folder.glob(f"*/{CONFIG}"))]
    return found
