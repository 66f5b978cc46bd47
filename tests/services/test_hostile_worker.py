"""A stranger that reaches the port of a worker that is not locked: whatever it sends ends with a status, and the worker
goes on computing the right tokens in bounded memory."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cluster import until_idle
from hostile_requests import INSIDE, REFUSED, Code, Draw, changed
from test_hostile import GROWTH, OPTIONS

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect

SERVICE = "/pagewire.v1.WorkerService/"
ANY = REFUSED | {Code.OK, Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.RESOURCE_EXHAUSTED}


def steps(draw: Draw) -> pb.SchedulerOutput:
    """Of a session that is older than any."""
    huge = draw.choice([2**31, 2**32 - 1])
    return draw.choice(
        [
            lambda: pb.SchedulerOutput(),
            lambda: pb.SchedulerOutput(step_id=2**63),
            lambda: pb.SchedulerOutput(epoch=1, step_id=1, sequence_ids=[huge], num_scheduled_tokens=[huge]),
            lambda: pb.SchedulerOutput(epoch=1, step_id=1, sequence_ids=range(100_000)),
            lambda: pb.SchedulerOutput(
                epoch=1, step_id=1, new_sequences=[pb.NewSequence(sequence_id=huge, token_ids=[huge] * 1000)]
            ),
        ]
    )()


def adapters(draw: Draw) -> worker_pb.TakeAdapterRequest:
    return worker_pb.TakeAdapterRequest(
        fingerprint=draw.choice(["", "x", "../../etc/passwd", "x" * 100_000]),
        config=draw.choice([b"", b"{}", b"[" * 10_000, b'{"r": 1e999, "peft_type": "LORA"}']),
        data=draw.choice([b"", b"{}", b"\x80\x04]q\x00.", draw.randbytes(5000)]),
    )


def dropped(draw: Draw) -> worker_pb.DropAdapterRequest:
    return worker_pb.DropAdapterRequest(fingerprint=draw.choice(["", "../..", "x" * 100_000]))


KINDS: dict[str, Callable[[Draw], Any]] = {"Execute": steps, "TakeAdapter": adapters, "DropAdapter": dropped}


@pytest.mark.timeout(900)
async def test_a_strangers_garbage_does_a_worker_no_harm(
    tiny_model_directory: Path, request: pytest.FixtureRequest
) -> None:
    number = 10_000 if request.config.getoption("--soak") else 200
    draw = random.Random(2)
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            "--num-gpu-blocks-override",
            "64",
            "--block-size",
            "8",
            "--threads",
            "1",
            "--swap-space",
            "0",
        ],
    ) as server:
        (worker, _), plain = server.processes, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        memory = psutil.Process(worker.process.pid).memory_info
        async with (
            Client(server.target, retry_for=0) as client,
            grpc.aio.insecure_channel(worker_address(worker.process.pid), options=OPTIONS) as channel,
        ):
            expected = (await collect(client, "a bystander", plain)).outputs[0].token_ids
            before = 0
            for sent in range(number):
                if sent == number // 10:
                    before = memory().rss
                name = draw.choice([*KINDS])
                data = KINDS[name](draw).SerializeToString()
                data = changed(draw, data) if draw.random() < 0.5 else data
                name = draw.choice([name, name, "GetWorkerInfo", "GetTokenizer"])
                call: Any = channel.unary_stream(f"{SERVICE}{name}")(data, timeout=20)
                try:
                    async for _ in call:
                        pass
                    code, details = await call.code(), ""
                except grpc.aio.AioRpcError as error:
                    code, details = error.code(), error.details() or ""
                assert code in ANY, (name, code, details, data[:200])
                assert not INSIDE.search(details), details
                if sent % 50 == 0:
                    assert (await collect(client, "a bystander", plain)).outputs[0].token_ids == expected
            assert worker.process.poll() is None
            assert memory().rss < before + GROWTH
            (state,) = (await until_idle(server.admin_target)).workers
            assert state.num_free_device_blocks == state.num_device_blocks


def worker_address(process_id: int) -> str:
    (port,) = {
        one.laddr.port for one in psutil.Process(process_id).net_connections("tcp") if one.status == psutil.CONN_LISTEN
    }
    return f"127.0.0.1:{port}"
