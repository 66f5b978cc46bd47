"""Loads the served model from the files that the engine sends."""

import asyncio
import re

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.processes.temporary import TemporaryFolder
from scheduler_service.frontend.link.engine_connection import EngineConnection
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.tokenization import without_panic

MAX_REASON = 300
"""Largest number of characters of the reason why the model cannot be loaded."""


class ModelLoading:
    """Loads the model in a thread after its files have arrived. Create a `ModelLoading` inside the event loop."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._model: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self._files: dict[str, bytearray] = {}
        self._loading: asyncio.Task[None] | None = None

    @property
    def model(self) -> ServedModel | None:
        """The loaded model; None before the model is loaded, and after a failed load."""
        return self._model.result() if self._model.done() and self._model.exception() is None else None

    async def wait(self) -> ServedModel:
        """Wait until the model is loaded, without a time limit. Raises the error of a failed load."""
        return await asyncio.shield(self._model)

    def add(self, part: pb.ModelFile) -> None:
        """Append a received part of a model file to the file."""
        self._files.setdefault(part.name, bytearray()).extend(part.data)

    def begin(self, limits: pb.ModelLimits) -> None:
        """Start to load the model. Call `begin` after all model files have arrived."""
        self._loading = asyncio.create_task(self._load(limits))

    def cancel(self) -> None:
        if self._loading is not None:
            self._loading.cancel()

    async def _load(self, limits: pb.ModelLimits) -> None:
        def load() -> ServedModel:
            with TemporaryFolder("tokenizer") as folder:
                for name, data in self._files.items():
                    (folder / name).write_bytes(data)
                return ServedModel.load(limits, folder)

        try:
            self._model.set_result(await asyncio.to_thread(without_panic, load))
        except Exception as error:
            self._model.set_exception(error)
            self._connection.say(0, load_failed=pb.LoadFailed(reason=_reason(error)))
        self._files.clear()


def _reason(error: Exception) -> str:
    """The text of a loading error as one line, without the path of the temporary folder."""
    text = re.sub(r"[^\s'\"]*/pagewire-[^/\s'\"]*/?", "", str(error))
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split()) or type(error).__name__
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"
