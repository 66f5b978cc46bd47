"""WorkerService over real gRPC: fencing, order, isolation of failures, and answers while the device is busy."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import grpc
import pytest
import structlog
from fake_decode_graphs import FakeDecodeGraphs
from grpc_health.v1 import health_pb2, health_pb2_grpc
from message_helpers import new_message

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2, worker_service_pb2_grpc
from pagewire_common.errors import RequestError
from pagewire_common.server import GrpcServer
from worker_service import servicer
from worker_service.device_thread import DeviceThread
from worker_service.errors import DeviceLostError
from worker_service.model_runner import ModelRunner, RunningStep
from worker_service.parallel.ranks import Ranks
from worker_service.server import SERVICE_NAME
from worker_service.servicer import WorkerServicer
from worker_service.settings import WorkerSettings
from worker_service.worker import Worker, load_worker

SHUTTING_DOWN = (grpc.StatusCode.ABORTED, "the worker is shutting down")
PROMPT = [(7 * number * number + 3) % 131 for number in range(21)]


@pytest.fixture(scope="module", params=["step by step", "running ahead"])
def worker(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    worker = load_worker(
        WorkerSettings(
            model=str(tiny_checkpoint),
            device="cpu",
            block_size=4,
            num_device_blocks=64,
            swap_space=1e-4,
            cache=tmp_path_factory.mktemp("cache"),
        )
    )
    if request.param == "step by step":
        return worker
    model, engine = worker.runner.model, worker.runner.cache_engine
    graphs = FakeDecodeGraphs(model, engine.device_blocks, worker.limits.max_num_seqs, worker.limits.max_model_len)
    return replace(worker, runner=ModelRunner(model, engine, graphs))  # type: ignore[arg-type]


class Service:
    """A server on a free port and a channel to it."""

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


@pytest.fixture
async def loading() -> AsyncIterator[Service]:
    """A service whose model is not there yet."""
    server = GrpcServer([SERVICE_NAME], max_receive_bytes=1 << 20)
    servicer = WorkerServicer(DeviceThread())
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    service = Service(servicer, server, await server.start("127.0.0.1:0"))
    yield service
    await service.channel.close()
    await server.stop(servicer.drain, 0)


@pytest.fixture
def service(loading: Service, worker: Worker) -> Service:
    loading.servicer.set_ready(worker)
    return loading


def prompt_step(*sequences: pb.NewSequence) -> dict[str, Any]:
    return {
        "new_sequences": sequences,
        "sequence_ids": [new.sequence_id for new in sequences],
        "num_scheduled_tokens": [len(new.token_ids) for new in sequences],
    }


async def test_nothing_is_served_before_the_model_is_there(loading: Service) -> None:
    for call in (
        loading.stub.GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest()),
        loading.stub.GetTokenizer(worker_service_pb2.GetTokenizerRequest()).read(),
        loading.stub.Execute().read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "the worker is still loading its model"


async def test_the_worker_says_what_it_is(service: Service, tiny_checkpoint: Path) -> None:
    info = await service.stub.GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest())
    assert (info.protocol_version, info.model_id, info.dtype) == (1, tiny_checkpoint.name, "float32")
    assert (info.block_size, info.num_device_blocks, info.vocabulary_size, info.max_model_len) == (4, 64, 131, 128)
    assert info.block_bytes == 3 * 2 * 4 * 2 * 10 * 4
    assert info.num_host_blocks == int(1e-4 * 2**30) // info.block_bytes
    assert info.device.startswith("cpu (")
    assert list(info.features) == ["swap"]
    assert len(info.model_fingerprint) == 64
    assert info.swap_bytes_per_second > 0
    assert info.prefill_tokens_per_second > 0


async def test_the_tokenizer_comes_with_the_worker(service: Service, tiny_checkpoint: Path) -> None:
    received: dict[str, bytes] = {}
    async for piece in service.stub.GetTokenizer(worker_service_pb2.GetTokenizerRequest()):
        received[piece.name] = received.get(piece.name, b"") + piece.data
    assert received["tokenizer.json"] == (tiny_checkpoint / "tokenizer.json").read_bytes()
    assert "config.json" in received


async def test_steps_are_answered_in_order_also_when_sent_ahead(service: Service) -> None:
    client = service.session()
    one_by_one = list((await client.step(**prompt_step(new_message(1, PROMPT, range(10))))).token_ids)
    one_by_one += await client.generate(1, 5)
    await client.close()

    ahead = service.session()
    await ahead.send(**prompt_step(new_message(1, PROMPT, range(10))))
    for _ in range(5):
        await ahead.send(sequence_ids=[1])
    answers = [await ahead.call.read() for _ in range(6)]
    assert [answer.step_id for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert [answer.token_ids[0] for answer in answers] == one_by_one
    await ahead.close()


async def test_a_decode_is_launched_while_the_one_before_it_is_computed(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not worker.runner.runs_ahead:
        pytest.skip("this worker computes one step after the other")
    client = service.session()
    expected = list((await client.step(**prompt_step(new_message(1, PROMPT, range(10))))).token_ids)
    expected += await client.generate(1, 2)
    await client.close()

    computed, followed = threading.Event(), threading.Event()
    launch = worker.runner.launch

    def note_and_launch(output: Any, chunks: Sequence[Any], before: Any) -> Any:
        if before is not None:
            followed.set()
        return launch(output, chunks, before)

    monkeypatch.setattr(worker.runner, "launch", note_and_launch)
    monkeypatch.setattr(RunningStep, "is_done", lambda _: computed.is_set())
    computed.set()
    client = service.session()
    found = list((await client.step(**prompt_step(new_message(1, PROMPT, range(10))))).token_ids)
    computed.clear()
    await client.send(sequence_ids=[1])
    await client.send(sequence_ids=[1])
    assert await asyncio.to_thread(followed.wait, 60)
    computed.set()
    found += [(await client.call.read()).token_ids[0] for _ in range(2)]
    assert found == expected
    await client.close()


async def test_a_gap_in_step_ids_is_refused(service: Service) -> None:
    client = service.session()
    await client.step()
    client.step_id += 1
    await client.send()
    assert await client.status() == (grpc.StatusCode.FAILED_PRECONDITION, "step_id 3 where 2 was expected")


async def test_a_session_begins_with_its_first_step(service: Service) -> None:
    client = service.session()
    client.step_id = 4
    await client.send()
    assert await client.status() == (grpc.StatusCode.FAILED_PRECONDITION, "a session begins with step_id 1, not 5")


async def test_the_epoch_cannot_change_within_a_session(service: Service) -> None:
    client = service.session()
    await client.step()
    client.epoch += 1
    await client.send()
    assert (await client.status())[0] is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("old", [4, 5])
async def test_an_old_epoch_is_refused_and_disturbs_nobody(old: int, service: Service) -> None:
    client = service.session(epoch=5)
    await client.step()
    stale = service.session(epoch=old)
    await stale.send()
    code, details = await stale.status()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == f"epoch {old} is not newer than epoch 5, which this worker has served"
    await client.step()
    await client.close()
    info = await service.stub.GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest())
    assert info.epoch == 5


async def test_a_newer_session_ends_the_older_one_and_forgets_its_sequences(service: Service) -> None:
    older = service.session(epoch=1)
    await older.step(**prompt_step(new_message(1, PROMPT, range(10))))
    newer = service.session(epoch=2)
    await newer.step()
    assert await older.status() == (grpc.StatusCode.FAILED_PRECONDITION, "superseded by epoch 2")
    await newer.send(sequence_ids=[1])
    assert await newer.status() == (grpc.StatusCode.INVALID_ARGUMENT, "sequence 1 is not known")


@pytest.fixture
def gate(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> "Gate":
    return Gate(worker, monkeypatch)


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


async def test_nothing_of_a_dead_session_is_executed_after_the_newer_began(service: Service, gate: Gate) -> None:
    older = service.session(epoch=1)
    for _ in range(4):
        await older.send()
    await gate.wait_until_entered()
    newer = service.session(epoch=2)
    await newer.send()
    assert await older.status() == (grpc.StatusCode.FAILED_PRECONDITION, "superseded by epoch 2")
    gate.open.set()
    assert (await newer.call.read()).epoch == 2
    assert gate.steps == [(1, 1), (2, 1)]
    await newer.close()


async def test_health_answers_while_a_step_is_computed(service: Service, gate: Gate) -> None:
    await service.server.set_serving(True)
    client = service.session()
    await client.send()
    await gate.wait_until_entered()
    health = health_pb2_grpc.HealthStub(service.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    gate.open.set()
    assert await client.call.read()
    await client.close()


async def test_a_scheduler_that_vanishes_frees_the_worker(service: Service, gate: Gate) -> None:
    client = service.session()
    await client.send()
    await gate.wait_until_entered()
    client.call.cancel()
    await asyncio.wait_for(service.servicer.drain(60), 10)
    gate.open.set()


async def test_draining_lets_the_live_sequences_finish_and_refuses_other_sessions(service: Service) -> None:
    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(8))))
    drain = asyncio.create_task(service.servicer.drain(60))
    await client.generate(1, 2)
    late = service.session()
    await late.send()
    assert await late.status() == SHUTTING_DOWN
    assert not drain.done()
    await client.step(finished=[1])
    await asyncio.wait_for(drain, 10)
    assert await client.status() == SHUTTING_DOWN


async def test_draining_ends_a_session_that_outlasts_the_grace(service: Service) -> None:
    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(8))))
    await asyncio.wait_for(service.servicer.drain(0), 10)
    assert await client.status() == SHUTTING_DOWN


async def test_draining_does_not_wait_for_an_idle_session(service: Service) -> None:
    client = service.session()
    await client.step()
    await asyncio.wait_for(service.servicer.drain(60), 10)
    assert await client.status() == SHUTTING_DOWN


async def test_draining_ends_a_session_that_has_not_sent_a_step(service: Service) -> None:
    client = service.session()
    await client.call.wait_for_connection()
    await asyncio.wait_for(service.servicer.drain(60), 10)
    assert await asyncio.wait_for(client.status(), 10) == SHUTTING_DOWN


async def test_a_worker_says_whether_it_is_in_a_session_and_who_it_is(service: Service) -> None:
    async def info() -> worker_service_pb2.GetWorkerInfoResponse:
        return await service.stub.GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest())

    assert not (before := await info()).in_session
    client = service.session(epoch=3)
    await client.step()
    assert (during := await info()).in_session
    assert during.epoch == 3
    await client.close()
    assert not (after := await info()).in_session
    assert before.instance_id == during.instance_id == after.instance_id
    assert before.instance_id != WorkerServicer(DeviceThread())._instance_id


async def test_draining_without_a_session_is_done_at_once(service: Service) -> None:
    await asyncio.wait_for(service.servicer.drain(60), 10)


@pytest.mark.parametrize(
    ("malformed", "sentence"),
    [
        ({"sequence_ids": [9]}, "sequence 9 is not known"),
        ({"sequence_ids": [1, 1]}, "scheduled twice"),
        ({"sequence_ids": [1], "num_scheduled_tokens": [5]}, "cannot compute 5 tokens"),
        ({"block_table_updates": [pb.BlockTableUpdate(sequence_id=1, block_ids=[64])]}, "beyond the pool of 64"),
        ({"blocks_to_copy": pb.BlockMapping(sources=[1], destinations=[64])}, "blocks_to_copy: destination 64"),
        ({"draft_tokens": [pb.DraftTokens(sequence_id=1, token_ids=[1])]}, "draft_tokens"),
    ],
)
async def test_a_malformed_step_ends_the_session_with_a_sentence_and_the_worker_lives(
    malformed: dict[str, Any], sentence: str, service: Service
) -> None:
    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(6))))
    await client.send(**malformed)
    await client.send()  # what was sent ahead is not computed
    code, details = await client.status()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in details
    following = service.session()
    await following.step()
    await following.close()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("secret path"), grpc.StatusCode.INTERNAL),
        (MemoryError(), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RuntimeError("CUDA out of memory. Tried"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_a_step_that_breaks_ends_its_session_alone(
    failure: Exception, code: grpc.StatusCode, service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    client = service.session()
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner, "launch", fail)
        await client.send()
        found, details = await client.status()
    assert found is code
    assert "secret" not in details
    following = service.session()
    await following.step()
    await following.close()


async def test_what_a_failed_step_held_is_gone_when_the_device_recovers(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        pass

    held: list[weakref.ref[Held]] = []
    left: list[Held | None] = []

    def discard(*_: object) -> Never:
        raise structlog.DropEvent  # the formatter that is not configured here holds on to local variables

    def run_out(*_: object) -> None:
        tensor = Held()
        held.append(weakref.ref(tensor))
        raise MemoryError

    client = service.session()
    monkeypatch.setattr(servicer, "log", structlog.wrap_logger(structlog.PrintLogger(), [discard]))
    monkeypatch.setattr(worker.runner, "launch", run_out)
    monkeypatch.setattr(worker.runner, "recover", lambda: left.append(held[0]()))
    await client.send()
    assert (await client.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert left == [None]


async def test_a_device_that_is_lost_ends_the_session_and_opens_no_other(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def cannot_recover() -> None:
        raise DeviceLostError("CUDA error: device-side assert triggered")

    client = service.session()
    monkeypatch.setattr(worker.runner, "launch", fail)
    monkeypatch.setattr(worker.runner, "recover", cannot_recover)
    await client.send()
    assert await client.status() == (grpc.StatusCode.INTERNAL, "the worker's device failed in a step")
    assert service.servicer.device_lost.is_set()
    following = service.session()
    await following.send()
    assert await following.status() == (grpc.StatusCode.UNAVAILABLE, "the worker's device failed")


async def test_a_seed_samples_the_same_alone_in_a_batch_and_after_recompute(service: Service) -> None:
    def news(sequence_id: int, first_block: int, **sampling: Any) -> pb.NewSequence:
        return new_message(sequence_id, PROMPT, range(first_block, first_block + 9), **sampling)

    hot = {"temperature": 1.5, "top_p": 0.95, "seed": 2**63 + 7, "index": 2}
    client = service.session()
    alone = list((await client.step(**prompt_step(news(1, 0, **hot)))).token_ids)
    alone += await client.generate(1, 6)
    await client.close()

    client = service.session()
    together = [news(5, 20), news(1, 0, **hot), news(7, 40, temperature=0.8, seed=1)]
    answers = [await client.step(**prompt_step(*together))]
    answers += [await client.step(sequence_ids=[5, 1, 7]) for _ in range(3)]
    found = [answer.token_ids[1] for answer in answers]
    assert found == alone[:4]
    back = new_message(1, PROMPT + found, range(9), num_prompt_tokens=len(PROMPT), **hot)
    found += (await client.step(**prompt_step(back), preempted=[1])).token_ids
    assert found + await client.generate(1, 2) == alone
    await client.close()


async def test_copies_of_a_sequence_diverge_without_touching_each_other(service: Service) -> None:
    """One prefill, a fork, and a copy of the shared last block."""
    client = service.session()
    parent = new_message(1, PROMPT, range(6), temperature=1.5, seed=3, index=0)
    await client.step(**prompt_step(parent))
    fork = pb.Fork(
        parent_sequence_id=1,
        child_sequence_id=2,
        num_tokens=len(PROMPT),
        num_computed_tokens=len(PROMPT) - 1,
        block_ids=[0, 1, 2, 3, 4, 30, 31],
        index=1,
    )
    copy = pb.BlockMapping(sources=[5], destinations=[30])
    both = [await client.step(forks=[fork], blocks_to_copy=copy, sequence_ids=[1, 2])]
    update = pb.BlockTableUpdate(sequence_id=1, start=6, block_ids=[6])
    both += [await client.step(sequence_ids=[1, 2], block_table_updates=[update])]
    both += [await client.step(sequence_ids=[1, 2]) for _ in range(3)]
    child = [answer.token_ids[1] for answer in both]
    assert child != [answer.token_ids[0] for answer in both]
    await client.close()

    client = service.session()
    alone = new_message(2, PROMPT, range(40, 47), temperature=1.5, seed=3, index=1)
    expected = list((await client.step(**prompt_step(alone))).token_ids)
    assert expected + await client.generate(2, 4) == child
    await client.close()


async def test_a_row_of_nan_is_reported_and_its_neighbour_undisturbed(service: Service, worker: Worker) -> None:
    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(10)), new_message(2, PROMPT, range(10, 20))))
    expected = await client.step(sequence_ids=[1, 2])
    await client.close()

    client = service.session()
    await client.step(**prompt_step(new_message(1, PROMPT, range(10)), new_message(2, PROMPT, range(10, 20))))
    worker.runner.cache_engine.device_blocks[3] = float("nan")
    answer = await client.step(sequence_ids=[1, 2])
    assert list(answer.failed_sequence_ids) == [1]
    assert list(answer.token_ids) == [0, expected.token_ids[1]]
    await client.step(sequence_ids=[2], finished=[1])
    await client.close()


async def test_logprobs_come_with_the_tokens_that_ask(service: Service) -> None:
    client = service.session()
    asks = new_message(1, PROMPT, range(10), logprobs=3, prompt_logprobs=0)
    answer = await client.step(**prompt_step(asks, new_message(2, PROMPT, range(10, 20))))
    (report,) = answer.logprobs
    assert (report.sequence_id, report.width, list(report.ranks)) == (1, 4, [1])
    assert report.token_ids[0] == report.token_ids[1] == answer.token_ids[0]
    (prompt,) = answer.prompt_logprobs
    assert list(prompt.token_ids) == PROMPT[1:]
    await client.close()


async def test_a_device_that_fails_while_it_is_waited_for_ends_the_session_and_opens_no_other(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: RunningStep) -> Never:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def cannot_recover() -> None:
        raise DeviceLostError("CUDA error: an illegal memory access was encountered")

    client = service.session()
    monkeypatch.setattr(RunningStep, "is_done", fail)
    monkeypatch.setattr(RunningStep, "finish", fail)
    monkeypatch.setattr(worker.runner, "recover", cannot_recover)
    await client.send()
    assert await client.status() == (grpc.StatusCode.INTERNAL, "the worker's device failed in a step")
    assert service.servicer.device_lost.is_set()


async def test_ranks_that_were_sent_a_step_are_not_left_alone_with_it(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the first rank's part of every sum, whoever has taken the session over meanwhile."""
    launched: list[int] = []
    launch = worker.runner.launch

    class FakeRanks(Ranks):
        def send(self, epoch: int, message: bytes) -> None:
            assert service.servicer._stream is not None
            service.servicer._stream.end = RequestError(grpc.StatusCode.FAILED_PRECONDITION, "superseded")

        def alike(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    def note_and_launch(output: Any, chunks: Sequence[Any], before: Any) -> Any:
        launched.append(output.step_id)
        return launch(output, chunks, before)

    monkeypatch.setattr(worker.runner, "launch", note_and_launch)
    service.servicer.set_ready(replace(worker, ranks=FakeRanks(0, 2)))
    client = service.session()
    await client.send()
    await client.send()
    await client.status()
    assert launched == [1]
