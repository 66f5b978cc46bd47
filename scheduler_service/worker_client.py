"""The scheduler's end of the wire to one worker."""

import asyncio
from pathlib import Path
from time import perf_counter_ns

import grpc

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.codec import WorkerInfo, decode_model_output, decode_worker_info, encode_scheduler_output
from scheduler_service.core import ModelOutput, SchedulerOutput
from scheduler_service.step_split import RoundTrips, StepSplit

# A worker whose machine is gone without a word is noticed within about 20 s; one that comes back, within 2 s, where
# gRPC's own pause between attempts would grow to two minutes.
OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
TOKENIZER_FILES = frozenset(
    (
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    )
)
MAX_TOKENIZER_BYTES = 256 << 20


class WorkerError(Exception):
    """The worker cannot be used; the message says why."""


class Session:
    """One Execute stream: steps go out, their answers come back in the same order. `split` learns what each took."""

    def __init__(
        self, call: "grpc.aio.StreamStreamCall[pb.SchedulerOutput, pb.ModelOutput]", epoch: int, split: StepSplit
    ) -> None:
        self.epoch = epoch
        self.last_answer = pb.ModelOutput()  # as it came, for a recording
        self._call = call
        self._split = split
        self._round_trips = RoundTrips(split)

    async def send(self, output: SchedulerOutput) -> None:
        """Have a step run after those sent before. Raises grpc.aio.AioRpcError or WorkerError when the stream broke."""
        began = perf_counter_ns()
        message = encode_scheduler_output(output, self.epoch)
        encoded = perf_counter_ns()
        self._split.encode += encoded - began
        self._round_trips.sent(encoded)
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:  # the stream had ended before this step
            raise await self._ended() from None

    async def receive(self) -> ModelOutput:
        """The next answer. Raises grpc.aio.AioRpcError when the stream breaks, WorkerError on a wrong answer."""
        answer = await self._call.read()
        if not isinstance(answer, pb.ModelOutput):
            raise await self._ended()
        if answer.epoch != self.epoch:
            raise WorkerError(f"the worker answered for epoch {answer.epoch} in the session of epoch {self.epoch}")
        if not self._round_trips.num_in_flight:
            raise WorkerError(f"the worker answered step {answer.step_id}, and none was in flight")
        self._round_trips.answered(came := perf_counter_ns(), answer.timing)
        self.last_answer = answer
        try:
            output = decode_model_output(answer)
        except ValueError as error:
            raise WorkerError(str(error)) from error
        self._split.decode += perf_counter_ns() - came
        return output

    async def _ended(self) -> WorkerError:
        return WorkerError(f"the worker ended the session: {await self._call.details() or 'no reason given'}")

    def close(self) -> None:
        self._call.cancel()


class WorkerClient:
    """A channel to one worker. Create it inside the event loop that uses it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stub = WorkerServiceStub(self._channel)

    async def get_info(self) -> WorkerInfo:
        return decode_worker_info(await self._stub.GetWorkerInfo(worker_pb.GetWorkerInfoRequest(), timeout=10))

    async def fetch_tokenizer(self, directory: Path) -> None:
        """Write the worker's tokenizer files into a folder. Raises WorkerError on a file that is none."""
        left = MAX_TOKENIZER_BYTES
        async for piece in self._stub.GetTokenizer(worker_pb.GetTokenizerRequest(), timeout=60):
            left -= len(piece.data)
            if piece.name not in TOKENIZER_FILES or left < 0:
                raise WorkerError("the worker sent something that is not a tokenizer")
            with (directory / piece.name).open("ab") as file:
                file.write(piece.data)

    def open_session(self, epoch: int, split: StepSplit) -> Session:
        return Session(self._stub.Execute(), epoch, split)

    async def close(self) -> None:
        await self._channel.close()
