"""`python -m worker_service` from its first line to its exit status; where imports do not matter, it is forked."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from message_helpers import new_message

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2, worker_service_pb2_grpc
from pagewire_client import local
from pagewire_common.serving.server import LIVENESS
from worker_service.serving.server import SERVICE_NAME


class Process:
    """A worker process on a free port, read event by event. A `program` takes the place of the module."""

    def __init__(self, *arguments: str, program: str = "") -> None:
        arguments = ("--log-format", "json", "--device", "cpu", *arguments)
        if program:
            command = [sys.executable, "-c", program, *arguments]
            environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        else:
            self.process = local.start_process("worker_service", arguments)

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{") and (record := json.loads(line))["event"] == event:
                return dict(record)
        raise AssertionError(f"the worker ended before it logged {event!r}")

    def end(self) -> tuple[int, str]:
        """Exit status and the last line on stderr."""
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            rest = stderr.read()
        return self.process.wait(60), (rest.strip().splitlines() or [""])[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        return self.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Process] = []

    def start(*arguments: str, **options: Any) -> Process:
        started.append(Process("--listen", "127.0.0.1:0", "--cache", str(tmp_path), *arguments, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.usefixtures("true_starts")
def test_a_worker_serves_and_ends_with_status_zero_on_sigterm(start: Any, tiny_checkpoint: Path) -> None:
    worker = start("--model", str(tiny_checkpoint), "--num-gpu-blocks-override", "8", "--dtype", "bfloat16")
    address = worker.wait_for("listening")["address"]
    ready = worker.wait_for("ready")
    assert (ready["model"], ready["dtype"], ready["num_device_blocks"]) == (tiny_checkpoint.name, "bfloat16", 8)
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        info = worker_service_pb2_grpc.WorkerServiceStub(channel).GetWorkerInfo(
            worker_service_pb2.GetWorkerInfoRequest()
        )
        assert info.dtype == "bfloat16"
    assert worker.stop()[0] == 0


@pytest.mark.parametrize("size", [1, 2])
def test_sigterm_lets_the_live_sequences_finish_and_leaves_no_process(
    size: int, start: Any, tiny_checkpoint: Path
) -> None:
    worker = start(
        "--model", str(tiny_checkpoint), "--num-gpu-blocks-override", "8", "--tensor-parallel-size", str(size)
    )
    address = worker.wait_for("listening")["address"]
    worker.wait_for("ready")
    ranks = psutil.Process(worker.process.pid).children()
    assert len(ranks) == (size if size > 1 else 0)
    with grpc.insecure_channel(address) as channel:
        begun, ended = threading.Event(), threading.Event()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        def steps() -> Iterator[pb.SchedulerOutput]:
            first = pb.SchedulerOutput(epoch=1, step_id=1, sequence_ids=[7], num_scheduled_tokens=[2])
            first.new_sequences.append(new_message(7, [1, 2], [0]))
            yield first
            assert begun.wait(60)
            worker.process.send_signal(signal.SIGTERM)
            for update in watch:
                if update.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
            alive = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=LIVENESS))
            assert alive.status == health_pb2.HealthCheckResponse.SERVING
            yield pb.SchedulerOutput(epoch=1, step_id=2, sequence_ids=[7])
            yield pb.SchedulerOutput(epoch=1, step_id=3, finished=[7])
            ended.wait(60)

        answers = worker_service_pb2_grpc.WorkerServiceStub(channel).Execute(steps())
        assert len(next(answers).token_ids) == 1
        begun.set()
        assert len(next(answers).token_ids) == 1
        assert next(answers).step_id == 3
        with pytest.raises(grpc.RpcError, match="the worker is shutting down"):
            next(answers)
        ended.set()
        watch.cancel()
    assert worker.end()[0] == 0
    assert not any(rank.is_running() for rank in ranks)


LOSES_ITS_DEVICE = """
import runpy
from worker_service.errors import DeviceLostError
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.session.session import Session

def fail(self, *_):
    raise DeviceLostError("CUDA error: an illegal memory access was encountered")

Session.apply = ModelRunner.recover = fail
runpy.run_module("worker_service", run_name="__main__")
"""


def test_a_lost_device_ends_the_process_with_an_error_for_another_to_take_its_place(
    start: Any, tiny_checkpoint: Path
) -> None:
    worker = start("--model", str(tiny_checkpoint), "--num-gpu-blocks-override", "8", program=LOSES_ITS_DEVICE)
    address = worker.wait_for("listening")["address"]
    worker.wait_for("ready")
    with grpc.insecure_channel(address) as channel:
        session = worker_service_pb2_grpc.WorkerServiceStub(channel).Execute(
            iter([pb.SchedulerOutput(epoch=1, step_id=1)])
        )
        with pytest.raises(grpc.RpcError, match="the worker's device failed in a step"):
            next(session)
    status, last_line = worker.end()
    assert status == 1
    assert "the device cannot be used any more" in last_line


@pytest.mark.usefixtures("true_starts")
def test_sigterm_while_loading_ends_with_status_zero(start: Any, tiny_checkpoint: Path) -> None:
    worker = start("--model", str(tiny_checkpoint))
    worker.wait_for("listening")
    status, last_line = worker.stop()
    assert (status, json.loads(last_line)["event"]) == (0, "stopped")


def test_a_worker_says_what_it_does_from_its_start_to_its_end(start: Any, tiny_checkpoint: Path) -> None:
    worker = start("--model", str(tiny_checkpoint))
    said = [worker.wait_for("loading").get("stage") for _ in range(4)]
    assert said == [None, "checking weights", "fingerprinting weights", "loading weights"]
    worker.wait_for("ready")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait_for("stopping")["in_session"] is False
    assert json.loads(worker.end()[1])["event"] == "stopped"


def test_a_port_in_use_is_one_sentence(start: Any, tiny_checkpoint: Path) -> None:
    first = start("--model", str(tiny_checkpoint))
    address = first.wait_for("listening")["address"]
    status, sentence = start("--model", str(tiny_checkpoint), "--listen", address).end()
    assert status == 1
    port = address.rpartition(":")[2]
    assert sentence == (
        f"worker_service: --listen: cannot listen on {address}: port {port} is in use by another process; "
        "end that one, or give --listen another port"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "/nowhere"], "there is no file or folder /nowhere"),
        (["--max-model-len", "129"], "--max-model-len is 129; the model's limit is 128"),
    ],
)
def test_a_worker_that_cannot_start_says_why(
    arguments: list[str], sentence: str, start: Any, tiny_checkpoint: Path
) -> None:
    assert start("--model", str(tiny_checkpoint), *arguments).end() == (1, f"worker_service: {sentence}")


def test_an_unsupported_family_is_named(start: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    status, sentence = start("--model", str(tmp_path)).end()
    assert status == 1
    assert sentence.endswith(
        "config.json: a model rwkv is not supported: it keeps states of a kind that is not supported"
    )
