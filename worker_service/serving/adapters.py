"""Loads a LoRA adapter that the scheduler sends into the host memory of every rank, while steps continue."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

import grpc
import structlog

from pagewire.v1.worker_service_pb2 import TakeAdapterRequest
from pagewire_common.calls.errors import RequestError
from pagewire_common.processes.temporary import TemporaryFolder
from worker_service.serving.device_thread import DeviceThread

if TYPE_CHECKING:
    # This import loads torch.
    from worker_service.execution.worker import Worker
    from worker_service.loading.adapter import Adapter

log = structlog.get_logger()

MAX_CONFIG_BYTES = 1 << 20


async def load_adapter(
    worker: "Worker", device_thread: DeviceThread, pieces: AsyncIterator[TakeAdapterRequest]
) -> None:
    """Receive, check and store an adapter in all ranks. Raises RequestError. `AdapterCalls` allows one at a time.

    Steps submitted afterwards may name the adapter. A cancelled call leaves the adapters unchanged."""
    refusal: RequestError | None = None
    try:
        await _receive(worker, device_thread, pieces)
    except RequestError as error:
        refusal = error
    with contextlib.suppress(RequestError):
        # The remaining pieces are read, because gRPC may lose the status of a call that ends while the client writes.
        async for _ in pieces:
            pass
    if refusal is not None:
        raise refusal


def drop_adapter(worker: "Worker", device_thread: DeviceThread, fingerprint: str) -> None:
    """Drop an adapter in all ranks, after the steps that are already submitted."""
    from worker_service.execution.adapters.rank_adapters import drop

    if fingerprint in worker.adapters.fingerprints:
        worker.adapters.fingerprints.remove(fingerprint)
        device_thread.submit(partial(drop, worker.ranks, worker.adapters, fingerprint))


async def _receive(worker: "Worker", device_thread: DeviceThread, pieces: AsyncIterator[TakeAdapterRequest]) -> None:
    """Load an adapter through a temporary file."""
    adapters = worker.adapters
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

    from worker_service.loading.adapter import WEIGHTS, AdapterError, read_adapter

    with TemporaryFolder("adapter") as folder:
        digest, num_bytes = hashlib.sha256(), 0
        with open(folder / WEIGHTS, "wb") as file:  # noqa: ASYNC230  # a cancelled thread leaves files open
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
            raise _invalid("the received adapter does not have the stated fingerprint")

        def read() -> "tuple[Adapter, Adapter]":
            # One thread, because several would wait for the threads that compute steps. The number holds for this
            # thread and for threads that start later. On two busy cores, reading 77 MiB (for 7 billion weights) took
            # 0.6 s with one thread, and 4 to 17 s with two.
            torch.set_num_threads(1)
            found = read_adapter(first.config, folder, adapters.shapes, adapters.room.max_rank, adapters.dtype)
            return found, found.part(adapters.cuts)

        try:
            adapter, own = await asyncio.to_thread(read)
        except AdapterError as error:
            raise _invalid(str(error)) from None
    await _hold(worker, device_thread, whole, adapter, own)
    log.info("adapter loaded", fingerprint=whole, bytes=adapter.num_bytes)


async def _hold(
    worker: "Worker", device_thread: DeviceThread, fingerprint: str, adapter: "Adapter", own: "Adapter"
) -> None:
    """Store an adapter in all ranks. own: the first rank's part."""
    from worker_service.execution.adapters.rank_adapters import PIECE_BYTES, abandon, hand_over, hold

    if worker.ranks.size > 1:
        try:
            for piece in adapter.pieces(PIECE_BYTES):
                # A piece is submitted after the previous piece is sent, so that waiting steps run in between.
                await asyncio.wrap_future(device_thread.submit(partial(hand_over, worker.ranks, piece)))
        except asyncio.CancelledError:
            device_thread.submit(partial(abandon, worker.ranks))
            raise
    # Not awaited: later steps run after this work.
    device_thread.submit(partial(hold, worker.ranks, worker.adapters, fingerprint, own))
    worker.adapters.fingerprints.append(fingerprint)


def _invalid(reason: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, reason)
