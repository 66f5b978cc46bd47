"""A worker of two ranks from outside: one endpoint, one life."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from message_helpers import new_message
from test_worker_process import Process

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1.worker_service_pb2 import GetWorkerInfoRequest, GetWorkerInfoResponse
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_common.start_error import StartError
from worker_service.errors import InvalidStepError
from worker_service.models.decoders.shard import part_of
from worker_service.models.registry import read_config
from worker_service.parallel.cut import UNCUT
from worker_service.parallel.ranks import ALONE, Ranks
from worker_service.serving.launcher import wait_for_end

SIZES = ("--num-gpu-blocks-override", "32", "--block-size", "4", "--threads", "1", "--swap-space", "0.001")
FAILING = """
from worker_service.parallel.ranks import Ranks
try:
    with Ranks(1, 2).together():
        raise MemoryError("no more")
except MemoryError:
    print("goes on")
"""
SECONDS_TO_END = 20
"""For processes that end at once, on a machine that may be busy."""


class RankedWorker:
    """A worker and the processes that it is made of, known from when it is ready."""

    def __init__(self, model: Path, cache: Path, size: int, *arguments: str) -> None:
        ranks = ("--tensor-parallel-size", str(size)) if size > 1 else ()
        flags = ("--listen", "127.0.0.1:0", "--model", str(model), "--cache", str(cache), *SIZES, *ranks, *arguments)
        self.process = Process(*flags)
        self.address = self.process.wait_for("listening")["address"]
        self.process.wait_for("ready")
        self.ranks = psutil.Process(self.process.process.pid).children()

    def all_gone(self) -> bool:
        _, alive = psutil.wait_procs(self.ranks, timeout=SECONDS_TO_END)
        return not alive

    def kill(self) -> None:
        self.process.kill()
        for rank in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


@pytest.fixture
def start(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[RankedWorker] = []

    def start(size: int, *arguments: str) -> RankedWorker:
        started.append(RankedWorker(tiny_checkpoint, tmp_path, size, *arguments))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


def info(stub: WorkerServiceStub) -> GetWorkerInfoResponse:
    return stub.GetWorkerInfo(GetWorkerInfoRequest())


def generate(stub: WorkerServiceStub, epoch: int, count: int) -> list[int]:
    """A session of one sequence that is drawn at random."""

    def steps() -> Iterator[pb.SchedulerOutput]:
        first = pb.SchedulerOutput(epoch=epoch, step_id=1, sequence_ids=[7], num_scheduled_tokens=[5])
        first.new_sequences.append(new_message(7, [1, 2, 3, 4, 5], range(8), temperature=1.0, seed=3))
        yield first
        for step_id in range(2, count + 1):
            yield pb.SchedulerOutput(epoch=epoch, step_id=step_id, sequence_ids=[7])

    return [token_id for answer in stub.Execute(steps()) for token_id in answer.token_ids]


def test_ranks_are_the_worker_that_one_process_is(start: Any) -> None:
    """Sessions that end with an error, or are superseded, leave them in step."""
    with grpc.insecure_channel(start(1).address) as plain, grpc.insecure_channel(start(2).address) as ranked:
        alone, together = WorkerServiceStub(plain), WorkerServiceStub(ranked)
        expected = generate(alone, 1, 20)
        assert len(set(expected)) > 5
        assert generate(together, 1, 20) == expected
        bad = pb.SchedulerOutput(epoch=2, step_id=1, new_sequences=[new_message(7, [1], [32])])
        with pytest.raises(grpc.RpcError, match="block 32 is beyond the pool of 32 device blocks"):
            list(together.Execute(iter([bad])))
        twice = pb.SchedulerOutput(epoch=3, step_id=1, new_sequences=[new_message(7, [1], [0])])
        with pytest.raises(grpc.RpcError, match="step_id 1 where 2 was expected"):
            list(together.Execute(iter([twice, twice])))
        long = [new_message(number, [9] * 20, [0]) for number in range(250)]
        step = pb.SchedulerOutput(epoch=4, step_id=1, new_sequences=long)
        assert step.ByteSize() > 2 * 4096  # more than ranks are sent at once
        assert [answer.step_id for answer in together.Execute(iter([step]))] == [1]
        assert generate(together, 5, 20) == expected

        one, two = info(alone), info(together)
        assert two.device == f"{one.device} x 2"
        for name in ("model_fingerprint", "dtype", "block_size", "num_device_blocks", "num_host_blocks", "block_bytes"):
            assert getattr(two, name) == getattr(one, name), name


def test_a_dead_rank_is_a_dead_worker(start: Any) -> None:
    worker = start(2)
    with grpc.insecure_channel(worker.address) as channel:
        begun = threading.Event()

        def steps() -> Iterator[pb.SchedulerOutput]:
            first = pb.SchedulerOutput(epoch=1, step_id=1, sequence_ids=[7], num_scheduled_tokens=[2])
            first.new_sequences.append(new_message(7, [1, 2], range(32)))
            yield first
            begun.set()
            for step_id in range(2, 100):
                yield pb.SchedulerOutput(epoch=1, step_id=step_id, sequence_ids=[7])

        answers = WorkerServiceStub(channel).Execute(steps())
        assert begun.wait(60)
        worker.ranks[1].kill()
        with pytest.raises(grpc.RpcError):
            list(answers)
    assert worker.process.process.wait(SECONDS_TO_END) == 1
    assert worker.all_gone()


def test_ranks_listen_on_the_loopback_only_and_do_not_outlive_the_process_that_started_them(start: Any) -> None:
    worker = start(2)
    processes = [psutil.Process(worker.process.process.pid), *worker.ranks]
    sockets = [connection for process in processes for connection in process.net_connections()]
    listening = {connection.laddr.ip for connection in sockets if connection.status == psutil.CONN_LISTEN}
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    worker.process.process.kill()
    assert worker.all_gone()


def test_what_every_rank_finds_wrong_is_said_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--cache", str(tmp_path), "--tensor-parallel-size", "2", "--log-level", "error")
    worker = Process(*flags, "--model", str(tiny_checkpoint), "--max-model-len", "129")
    assert worker.process.stderr is not None
    with worker.process.stderr as stderr:
        said = stderr.read().splitlines()
    assert (worker.process.wait(60), said) == (1, ["worker_service: --max-model-len is 129; the model's limit is 128"])


@pytest.mark.parametrize(
    ("ranks", "status"),
    [
        (["exit 0", "exec sleep 600"], 0),
        (["exit 1", "exec sleep 600"], 1),
        (["kill -9 $$", "exit 0"], 1),
        (["kill -TERM $$", "exec sleep 600"], 0),  # told to stop before it knew how to drain
        (["exec sleep 600", "exec sleep 600", "kill -9 $$"], 1),
        (["exec sleep 600", "exit 1"], 1),
        (["read line; exit 0", "exit 0"], 0),  # the second knew of it first
    ],
)
def test_the_first_rank_decides_how_the_worker_ends_unless_another_fails(ranks: list[str], status: int) -> None:
    reading, writing = os.pipe()
    processes = [subprocess.Popen(["sh", "-c", rank], stdin=reading) for rank in ranks]
    os.close(reading)
    releasing = threading.Thread(target=lambda: (processes[-1].wait(), os.close(writing)))
    releasing.start()
    assert wait_for_end(processes) == status
    releasing.join()
    assert all(process.returncode is not None for process in processes)


def test_a_rank_that_fails_in_a_step_ends_for_it_has_lost_its_place() -> None:
    ended = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "this rank failed in a step" in ended.stderr
    assert "MemoryError: no more" in ended.stderr


def test_a_step_that_makes_no_sense_ends_no_rank() -> None:
    """All ranks find it, and none computes it."""
    with pytest.raises(InvalidStepError, match="no sense"), Ranks(1, 2).together():
        raise InvalidStepError("no sense")


def test_networks_that_are_not_cut_are_refused() -> None:
    gpt2 = read_config({"model_type": "gpt2", "n_embd": 60, "n_layer": 2, "n_head": 6, "vocab_size": 131})
    with pytest.raises(StartError, match="--tensor-parallel-size is for the families that run natively"):
        part_of(gpt2, Ranks(0, 2))
    assert part_of(gpt2, ALONE) == (6, UNCUT)
