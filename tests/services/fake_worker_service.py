"""A worker without a model, over real gRPC: every token it samples is the letter "g", and it can be told to fail."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

TOKEN = 73  # "g" of the byte tokenizer


class FakeWorkerService(WorkerServiceServicer):
    """Ends the session when it is asked to compute a prompt that contains `poison`."""

    def __init__(self, tokenizer_directory: Path, *, poison: int | None = None, num_device_blocks: int = 64) -> None:
        self.tokenizer_directory = tokenizer_directory
        self.poison = poison
        self.num_sessions = 0
        self.info = worker_pb.GetWorkerInfoResponse(
            protocol_version=1,
            model_id="fake",
            model_fingerprint="f",
            dtype="float32",
            block_size=8,
            num_device_blocks=num_device_blocks,
            max_num_batched_tokens=128,
            max_num_seqs=16,
            max_model_len=512,
            vocabulary_size=259,
        )

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb.GetWorkerInfoResponse:  # noqa: N802
        return self.info

    def GetTokenizer(self, request: Any, context: Any) -> Iterator[worker_pb.GetTokenizerResponse]:  # noqa: N802
        for file in self.tokenizer_directory.iterdir():
            yield worker_pb.GetTokenizerResponse(name=file.name, data=file.read_bytes())

    async def Execute(  # noqa: N802
        self, requests: AsyncIterator[pb.SchedulerOutput], context: Any
    ) -> AsyncIterator[pb.ModelOutput]:
        self.num_sessions += 1
        poisoned: set[int] = set()
        async for output in requests:
            poisoned |= {new.sequence_id for new in output.new_sequences if self.poison in new.token_ids}
            poisoned |= {fork.child_sequence_id for fork in output.forks if fork.parent_sequence_id in poisoned}
            if poisoned & set(output.sequence_ids):
                await context.abort(grpc.StatusCode.INTERNAL, "a step failed")
            num_samples = sum(output.samples) if output.samples else len(output.sequence_ids)
            yield pb.ModelOutput(epoch=output.epoch, step_id=output.step_id, token_ids=[TOKEN] * num_samples)


@asynccontextmanager
async def serving(worker: FakeWorkerService) -> AsyncIterator[str]:
    """Serve it on a free port; gives the address."""
    server = grpc.aio.server()
    add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)
