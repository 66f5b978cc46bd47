"""A worker that sleeps instead of computing, serves WorkerService over real gRPC, and reports its idle time.

The worker is idle from the planned end of a step until the next step arrives. A late timer of this process therefore
does not count as idle, but delays the answer, which can only worsen the scheduler's figures.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceServicer

TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
MAX_NUM_SEQS = 256
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
FIRST_WORD, LAST_WORD = 1_000, 40_000
"""Ids of ordinary tokens of the default model."""


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    num_steps: int = 0
    num_sequences: int = 0
    """Sequences of a step, summed over all steps."""


class SleepingWorkerService(WorkerServiceServicer):
    """A worker without a model, whose sampled tokens are random."""

    def __init__(self, directory: Path, step_seconds: float) -> None:
        self.counters = Counters()
        self._directory = directory
        self._step_seconds = step_seconds
        draw = random.Random(0)
        self._words = [draw.randrange(FIRST_WORD, LAST_WORD) for _ in range(4096)]

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb.GetWorkerInfoResponse:
        config = json.loads((self._directory / "config.json").read_text())
        return worker_pb.GetWorkerInfoResponse(
            protocol_version=4,
            model_id=self._directory.resolve().name,
            model_fingerprint="sleeping",
            dtype="float32",
            device="none",
            block_size=BLOCK_SIZE,
            num_device_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE,
            max_num_batched_tokens=2048,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            vocabulary_size=config["vocab_size"],
        )

    def GetTokenizer(self, request: Any, context: Any) -> Iterator[worker_pb.GetTokenizerResponse]:
        for name in TOKENIZER_FILES:
            data = (self._directory / name).read_bytes()
            for start in range(0, len(data), 1 << 20):
                yield worker_pb.GetTokenizerResponse(name=name, data=data[start : start + (1 << 20)])

    async def TakeAdapter(
        self, request_iterator: AsyncIterator[worker_pb.TakeAdapterRequest], context: Any
    ) -> worker_pb.TakeAdapterResponse:
        return worker_pb.TakeAdapterResponse()

    async def DropAdapter(self, request: worker_pb.DropAdapterRequest, context: Any) -> worker_pb.DropAdapterResponse:
        return worker_pb.DropAdapterResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[pb.SchedulerOutput], context: Any
    ) -> AsyncIterator[pb.ModelOutput]:
        steps: asyncio.Queue[tuple[float, pb.SchedulerOutput] | None] = asyncio.Queue()

        async def read() -> None:
            async for step in request_iterator:
                steps.put_nowait((time.monotonic(), step))
            steps.put_nowait(None)

        reader = asyncio.create_task(read())
        counters, ends = self.counters, 0.0
        try:
            while (item := await steps.get()) is not None:
                came, step = item
                ends = max(came, ends) + self._step_seconds
                counters.num_steps += 1
                counters.num_sequences += len(step.sequence_ids)
                answer = self._answer(step)
                await asyncio.sleep(ends - time.monotonic())
                yield answer
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _answer(self, step: pb.SchedulerOutput) -> pb.ModelOutput:
        num_samples = sum(step.samples) if step.samples else len(step.sequence_ids)
        start = step.step_id * 7 % (len(self._words) - MAX_NUM_SEQS)
        return pb.ModelOutput(
            epoch=step.epoch,
            step_id=step.step_id,
            token_ids=self._words[start : start + num_samples],
            timing=pb.StepTiming(forward_us=int(1e6 * self._step_seconds)),
        )
