"""Loads the served model from the files that the engine sends."""

import asyncio
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.processes.temporary import TemporaryFolder
from scheduler_service.frontend.link.engine_connection import EngineConnection
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.panics import without_panic

MAX_REASON = 300


class ModelLoading:
    """Loads the model on a thread, after its files have arrived. Create the object inside the event loop."""

    def __init__(self, connection: EngineConnection, response_template: Mapping[str, Any] | None = None) -> None:
        self._connection, self._response_template = connection, response_template
        self.model: ServedModel | None = None
        """None before the model is loaded, and after a failed load."""
        self._loaded: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self._files: dict[str, bytearray] = {}
        self._digest = hashlib.sha256()  # of the files that the engine sends
        self._begun = b""  # digest of the fingerprint and the files of the model that is loaded
        self._loading: asyncio.Task[None] | None = None

    async def wait(self) -> ServedModel:
        return await asyncio.shield(self._loaded)

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def add(self, part: pb.ModelFile) -> None:
        self._digest.update(part.SerializeToString(deterministic=True))
        if not self.has_begun:
            self._files.setdefault(part.name, bytearray()).extend(part.data)

    def begin(self, limits: pb.ModelLimits) -> bool:
        """Load the model, once; later, its limits may have changed with its workers. Returns False if a model with
        another fingerprint or other files has been loaded before.
        """
        self._digest.update(limits.fingerprint.encode())
        described, self._digest = self._digest.digest(), hashlib.sha256()
        if not self.has_begun:
            self._begun = described
            self._loading = asyncio.create_task(self._load(limits))
        elif described == self._begun and self.model is not None:
            self.model = self.model.with_limits(limits)
        return described == self._begun

    def forget_files(self) -> None:
        """Forget the files of an engine that was lost before it sent all."""
        self._digest = hashlib.sha256()
        if not self.has_begun:
            self._files.clear()

    def cancel(self) -> None:
        if self._loading is not None:
            self._loading.cancel()

    async def _load(self, limits: pb.ModelLimits) -> None:
        def load() -> ServedModel:
            with TemporaryFolder("tokenizer") as folder:
                for name, data in self._files.items():
                    (folder / name).write_bytes(data)
                return ServedModel.load(limits, folder, self._response_template)

        try:
            self.model = await asyncio.to_thread(without_panic, load)
            self._loaded.set_result(self.model)
        except Exception as error:
            self._loaded.set_exception(error)
            self._connection.say(0, load_failed=pb.LoadFailed(reason=_reason(error)))
        self._files.clear()


def _reason(error: Exception) -> str:
    """A loading error as one line, without the path of the temporary folder."""
    text = re.sub(r"[^\s'\"]*/pagewire-[^/\s'\"]*/?", "", str(error))
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split()) or type(error).__name__
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"
