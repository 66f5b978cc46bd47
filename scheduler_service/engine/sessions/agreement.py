"""The model that every worker has to serve: that of the first worker."""

import asyncio
import contextlib

import structlog

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.core import SchedulerConfig
from scheduler_service.core.config import MAX_BLOCKS, LayerGroup
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.errors import WorkerError
from scheduler_service.engine.worker_link.limits import (
    check_limits,
    layer_groups,
    model_limits,
    model_name,
    scheduler_config,
    settings_above,
)
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import PROTOCOL_VERSION, WorkerInfo

LONG_FETCH_SECONDS = 5.0
"""Seconds of fetching the model's files from one worker before another is asked too."""

log = structlog.get_logger()


class Agreement:
    """Create the object inside the event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.model_files: dict[str, bytes] = {}
        self._settings = settings
        self._model_name = model_name(settings.model) if settings.model is not None else ""
        self._limits: asyncio.Future[pb.ModelLimits] = asyncio.get_running_loop().create_future()
        self._layer_groups: tuple[LayerGroup, ...] = ()  # of the first worker
        self._asked: asyncio.Event | None = None  # while the files are fetched

    async def wait_for_model(self) -> pb.ModelLimits:
        return await asyncio.shield(self._limits)

    @property
    def model_name(self) -> str:
        """The model's name for clients; empty until a worker has reported the model."""
        return self._settings.served_model_name or self._model_name

    async def accept(self, client: WorkerClient, info: WorkerInfo) -> SchedulerConfig:
        """The core's settings for a worker; the first worker decides the model. Raises WorkerError."""
        if info.protocol_version != PROTOCOL_VERSION:
            raise WorkerError(f"the worker speaks protocol {info.protocol_version}, this scheduler {PROTOCOL_VERSION}")
        if self._model_name not in ("", info.model_id):
            raise WorkerError(f"the worker serves the model {info.model_id!r}, this scheduler {self._model_name!r}")
        if (num_blocks := info.num_device_blocks + info.num_host_blocks) > MAX_BLOCKS:
            raise WorkerError(f"the worker has {num_blocks} blocks; this scheduler manages at most {MAX_BLOCKS}")
        try:
            scheduler_config(self._settings, info)
        except ValueError as error:
            raise WorkerError(f"it cannot be scheduled: {error}") from None
        for flag, (ours, theirs) in settings_above(self._settings, info).items():
            log.warning("a flag is above the worker's limit, which counts", flag=flag, value=ours, limit=theirs)
        await self._learn_model(client, info)
        try:
            check_limits(limits := self._limits.result(), self._layer_groups, self._settings, info)
        except ValueError as error:
            raise WorkerError(str(error)) from None
        return scheduler_config(self._settings, info, limits)

    async def _learn_model(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Get the model's files from one worker at a time, unless it is slow. Raises WorkerError."""
        with contextlib.suppress(TimeoutError):
            while not self._limits.done() and self._asked is not None:
                await asyncio.wait_for(self._asked.wait(), LONG_FETCH_SECONDS)
        if self._limits.done():
            return
        asked = self._asked = asyncio.Event()
        try:
            files = await client.fetch_tokenizer()
            if not self._limits.done():
                self.model_files = files
                self._limits.set_result(model_limits(self._settings, info))
                self._layer_groups = layer_groups(info)
                self._model_name = info.model_id
        finally:
            asked.set()
            if self._asked is asked:
                self._asked = None
