"""The answers of requests alone: one at a time, on a roomy, undisturbed server of the same model."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from answers import Answer, ask
from drawn_requests import Asked
from drawn_settings import Model, roomy

from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import LocalServer

MAX_SERVERS = 3
"""Servers that are kept, because a start takes a second and more."""


@dataclass(frozen=True)
class Roomy:
    model: Path
    local: LocalServer


class Alone:
    """The roomy servers, by model and type; the least recently used one is evicted."""

    def __init__(self, folder: Path) -> None:
        self.adapters = folder / "adapters"
        self._folder = folder
        self._servers: OrderedDict[tuple[str, int, str], Roomy] = OrderedDict()

    def server(self, model: Model, dtype: str) -> Roomy:
        key = (model.name, model.num_ranks, dtype)
        if key not in self._servers:
            path = self._folder / model.name
            if not path.exists():
                model.write(path)
            if len(self._servers) == MAX_SERVERS:
                self._servers.popitem(last=False)[1].local.stop()
            settings = roomy(model, dtype, self.adapters)
            self._servers[key] = Roomy(
                path, LocalServer(str(path), worker_arguments=settings.worker, scheduler_arguments=settings.scheduler)
            )
        self._servers.move_to_end(key)
        return self._servers[key]

    async def answer(self, server: Roomy, asked: Asked) -> Answer:
        async with grpc.aio.insecure_channel(server.local.target) as channel:
            return await ask(InferenceServiceStub(channel), asked, is_disturbed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.local.stop()
