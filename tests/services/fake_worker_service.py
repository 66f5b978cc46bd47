"""A worker without a model, over real gRPC: it samples only the letter "g", and can be told to fail."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceServicer

TOKEN = 73  # "g" of the byte tokenizer


class FakeWorkerService(WorkerServiceServicer, health.aio.HealthServicer):
    """Ends the session when a prompt contains `poison`.

    Steps are computed while `runs` is set, which step number `stops_at` clears; health is answered while `is_well` is
    set. `spoil` changes answers, also to bytes that are no message. `wanted` is the room for drafts that a step's
    answer asks for, and `right` the number of right drafts.
    """

    def __init__(self, tokenizer_directory: Path, *, poison: int | None = None, num_device_blocks: int = 64) -> None:
        super().__init__()
        self.tokenizer_directory = tokenizer_directory
        self.poison = poison
        self.poison_status = grpc.StatusCode.INTERNAL
        self._vector_bytes: dict[int, int] = {}  # of a sequence; forks have none
        self.spoil: Callable[[pb.ModelOutput], Any] = lambda answer: answer
        self.wanted: Callable[[int], int | None] = lambda _: None
        self.right: Callable[[int], int] = lambda room: room
        self.runs, self.is_well = asyncio.Event(), asyncio.Event()
        self.runs.set()
        self.is_well.set()
        self.num_sessions = 0
        self.num_steps = 0
        self.num_prompts = 0
        self.undecodable: set[bytes] = set()  # digests of images
        self.received: list[pb.PromptItem] = []
        self.stops_at: int | None = None
        self.info = worker_pb.GetWorkerInfoResponse(
            protocol_version=4,
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

    async def GetTokenizer(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb.GetTokenizerResponse]:
        for file in self.tokenizer_directory.iterdir():
            yield worker_pb.GetTokenizerResponse(name=file.name, data=file.read_bytes())

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        await self.is_well.wait()
        return await super().Check(request, context)

    async def Execute(  # noqa: N802
        self, requests: AsyncIterator[pb.SchedulerOutput], context: Any
    ) -> AsyncIterator[Any]:
        self.num_sessions += 1
        poisoned: set[int] = set()
        async for output in requests:
            await self.runs.wait()
            poisoned |= {new.sequence_id for new in output.new_sequences if self.poison in new.token_ids}
            poisoned |= {fork.child_sequence_id for fork in output.forks if fork.parent_sequence_id in poisoned}
            if poisoned & set(output.sequence_ids):
                await context.abort(self.poison_status, "a step failed")
            samples = output.samples or [True] * len(output.sequence_ids)
            rooms = list(itertools.compress(output.num_draft_tokens, samples))
            num_tokens = [1 + self.right(room) for room in rooms] or [1] * sum(samples)
            wanted = self.wanted(output.step_id)
            self.num_steps += 1
            if self.num_steps == self.stops_at:
                self.runs.clear()
            self.num_prompts += len(output.new_sequences)
            self.received += [item for new in output.new_sequences for item in new.items]
            for new in output.new_sequences:
                self._vector_bytes[new.sequence_id] = 4 * new.sampling.pooling.dimensions
            vectors = [
                pb.SequenceVectors(sequence_id=sequence_id, data=bytes(num_bytes))
                for sequence_id, is_sampling in zip(output.sequence_ids, samples, strict=True)
                if is_sampling and (num_bytes := self._vector_bytes.get(sequence_id, 0))
            ]
            yield self.spoil(
                pb.ModelOutput(
                    vectors=vectors,
                    epoch=output.epoch,
                    step_id=output.step_id,
                    token_ids=[TOKEN] * sum(num_tokens),
                    num_tokens=num_tokens if rooms else (),
                    num_draft_tokens=rooms,
                    failed_items=[item for item in output.items_to_encode if item.digest in self.undecodable],
                    num_draft_tokens_wanted=() if wanted is None else [wanted] * len(num_tokens),
                )
            )


def _methods(worker: FakeWorkerService) -> dict[str, Any]:
    """As in the generated code, except that spoiled answers pass."""
    return {
        "GetWorkerInfo": grpc.unary_unary_rpc_method_handler(
            worker.GetWorkerInfo,
            worker_pb.GetWorkerInfoRequest.FromString,
            worker_pb.GetWorkerInfoResponse.SerializeToString,
        ),
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(
            worker.GetTokenizer,
            worker_pb.GetTokenizerRequest.FromString,
            worker_pb.GetTokenizerResponse.SerializeToString,
        ),
        "Execute": grpc.stream_stream_rpc_method_handler(
            worker.Execute,
            pb.SchedulerOutput.FromString,
            lambda answer: answer if isinstance(answer, bytes) else answer.SerializeToString(),
        ),
    }


@asynccontextmanager
async def serving(worker: FakeWorkerService, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve on a free port, or this; yields the address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("pagewire.v1.WorkerService", _methods(worker))]
    )
    health_pb2_grpc.add_HealthServicer_to_server(worker, server)
    port = server.add_insecure_port(listen)
    await server.start()
    yield f"127.0.0.1:{port}"
    worker.runs.set()
    worker.is_well.set()
    await server.stop(None)
