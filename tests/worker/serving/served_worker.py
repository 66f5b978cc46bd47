"""A worker's service on a free port, and the scheduler's end of its sessions."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2_grpc
from pagewire_common.serving.server import GrpcServer
from worker_service.execution.worker import Worker
from worker_service.serving.servicer import WorkerServicer

PROMPT = [(7 * number * number + 3) % 131 for number in range(21)]


class Service:
    def __init__(self, servicer: WorkerServicer, server: GrpcServer, address: str) -> None:
        self.servicer = servicer
        self.server = server
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = worker_service_pb2_grpc.WorkerServiceStub(self.channel)
        self.epoch = 0

    def session(self, epoch: int | None = None) -> "Client":
        """Open a session of a new epoch."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        return Client(self.stub.Execute(), self.epoch)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Steps wait during the block, so that all are sent before one can end the session."""
        is_over = threading.Event()
        self.servicer._device_thread.submit(lambda: is_over.wait(60))
        try:
            yield
        finally:
            is_over.set()


class Client:
    """The scheduler's end of a session."""

    def __init__(self, call: Any, epoch: int) -> None:
        self.call = call
        self.epoch = epoch
        self.step_id = 0

    async def send(self, **output: Any) -> None:
        self.step_id += 1
        await self.call.write(pb.SchedulerOutput(**{"epoch": self.epoch, "step_id": self.step_id, **output}))

    async def step(self, **output: Any) -> pb.ModelOutput:
        await self.send(**output)
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF, await self.call.details()
        return answer

    async def generate(self, sequence_id: int, count: int) -> list[int]:
        return [(await self.step(sequence_ids=[sequence_id])).token_ids[0] for _ in range(count)]

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the call ended."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()

    async def close(self) -> None:
        await self.call.done_writing()
        assert (await self.status())[0] is grpc.StatusCode.OK


class Gate:
    """Holds the device thread in its next step until it is opened."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.steps: list[tuple[int, int]] = []
        launch = worker.runner.launch

        def wait_and_launch(output: Any, chunks: Sequence[Any], before: Any) -> Any:
            self.steps.append((output.epoch, output.step_id))
            self.entered.set()
            assert self.open.wait(60)
            return launch(output, chunks, before)

        monkeypatch.setattr(worker.runner, "launch", wait_and_launch)

    async def wait_until_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait, 60)


def prompt_step(*sequences: pb.NewSequence) -> dict[str, Any]:
    return {
        "new_sequences": sequences,
        "sequence_ids": [new.sequence_id for new in sequences],
        "num_scheduled_tokens": [len(new.token_ids) for new in sequences],
    }
