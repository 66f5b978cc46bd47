"""An adapter on its way from the scheduler into host memory, beside the steps."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import structlog

from pagewire.v1.worker_service_pb2 import TakeAdapterRequest
from pagewire_common.errors import RequestError

if TYPE_CHECKING:
    from worker_service.execution.adapters import Adapters  # imports torch

log = structlog.get_logger()

MAX_CONFIG_BYTES = 1 << 20


async def load_adapter(adapters: "Adapters", pieces: AsyncIterator[TakeAdapterRequest]) -> None:
    """Receive an adapter, check it, and hold it. Raises RequestError."""
    refusal: RequestError | None = None
    try:
        await _receive(adapters, pieces)
    except RequestError as error:
        refusal = error
    async for _ in pieces:  # a call that ends while it is written to may lose its status in gRPC
        pass
    if refusal is not None:
        raise refusal


async def _receive(adapters: "Adapters", pieces: AsyncIterator[TakeAdapterRequest]) -> None:
    """The weights are in a file until they have been read, so that no more than the parts that are wanted come to
    memory."""
    if not adapters.room.num_slots:
        raise RequestError(
            grpc.StatusCode.FAILED_PRECONDITION, "this worker takes no adapters; start it with --max-loras"
        )
    first = await anext(pieces, None)
    if first is None:
        raise _invalid("nothing was sent")
    if first.fingerprint in adapters.fingerprints:
        return
    if len(adapters.fingerprints) >= adapters.room.max_loaded:
        raise RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"this worker holds {adapters.room.max_loaded} adapters, as many as --max-cpu-loras allows",
        )
    if len(first.config) > MAX_CONFIG_BYTES:
        raise _invalid(f"adapter_config.json has {len(first.config)} bytes; at most {MAX_CONFIG_BYTES} are allowed")
    import torch

    from worker_service.loading.adapter import WEIGHTS, Adapter, AdapterError, read_adapter

    with tempfile.TemporaryDirectory(prefix="pagewire-adapter-") as folder:
        digest, num_bytes = hashlib.sha256(), 0
        with open(Path(folder) / WEIGHTS, "wb") as file:  # noqa: ASYNC230  # a thread's would stay open when cancelled
            piece: TakeAdapterRequest | None = first
            while piece is not None:
                num_bytes += len(piece.data)
                if num_bytes > adapters.most_bytes:
                    raise _invalid(
                        f"adapter_model.safetensors has more than {adapters.most_bytes} bytes, "
                        f"which is more than rank {adapters.room.max_rank} (--max-lora-rank) can need"
                    )
                digest.update(piece.data)
                file.write(piece.data)
                piece = await anext(pieces, None)
        whole = hashlib.sha256(hashlib.sha256(first.config).digest() + digest.digest()).hexdigest()
        if whole != first.fingerprint:
            raise _invalid("what came does not have the fingerprint that was said")

        def read() -> Adapter:
            # Of this thread and of those that begin later: several threads would wait for those that compute steps. On
            # two busy cores 77 MiB of an adapter for a network of 7 billion weights took 4 to 17 s with two, and 0.6 s.
            torch.set_num_threads(1)
            return read_adapter(first.config, Path(folder), adapters.shapes, adapters.room.max_rank, adapters.dtype)

        try:
            adapter = await asyncio.to_thread(read)
        except AdapterError as error:
            raise _invalid(str(error)) from None
    adapters.add(whole, adapter)
    log.info("adapter loaded", fingerprint=whole, bytes=adapter.num_bytes)


def _invalid(reason: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, reason)
