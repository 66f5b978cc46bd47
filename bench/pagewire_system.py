"""Our two services, driven over gRPC."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import grpc

from bench.drive import Stream
from bench.load import CONTEXT
from pagewire.v1.admin_service_pb2 import GetClusterStateRequest, StepSplit
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire_client import Client, LocalServer, SamplingParams

BLOCK_SIZE = 16


class Pagewire:
    """A scheduler and a worker with the weights in `directory` and `cache_gib` of memory for keys and values.

    Raises ServerError when they do not start.
    """

    name = "pagewire"

    def __init__(self, directory: Path, cache_gib: float) -> None:
        began = time.perf_counter()
        num_blocks = blocks_in(cache_gib, json.loads((directory / "config.json").read_text()))
        self._server = LocalServer(
            str(directory),
            worker_arguments=[
                "--dtype", "bfloat16", "--max-model-len", str(CONTEXT),
                "--block-size", str(BLOCK_SIZE), "--num-device-blocks", str(num_blocks),
            ],
        )  # fmt: skip
        self.start_seconds = time.perf_counter() - began

    def pids(self) -> list[int]:
        return [service.process.pid for service in self._server.processes]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async with Client(self._server.target) as client:
            await client.get_model()  # the connection is made before anything is measured

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                sampling = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
                async for message in client.generate(prompt, sampling):
                    if message.token_ids:
                        yield len(message.token_ids)

            yield stream

    async def step_split(self) -> StepSplit:
        """Where the time of the worker's steps went so far."""
        async with grpc.aio.insecure_channel(self._server.target) as channel:
            response = await AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())
        (worker,) = response.state.workers
        return worker.step_split

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()


def blocks_in(gib: float, config: dict[str, int]) -> int:
    """How many blocks of a model's keys and values, 2 bytes each, fit into so much memory."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size
    return int(gib * 2**30) // (BLOCK_SIZE * token_bytes)
