"""A worker of two ranks that is handed adapters while it computes says what one process says."""

import asyncio
import contextlib
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from adapted_worker import adapter_messages, random_adapter
from message_helpers import new_message
from served_worker import PROMPT, Gate, Service, prompt_step
from test_rank_processes import SECONDS_TO_END, start
from torch import Tensor

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1.worker_service_pb2 import DropAdapterRequest, GetWorkerInfoRequest, TakeAdapterRequest
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_common.calls.errors import RequestError
from worker_service.execution.adapters import rank_adapters
from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.execution.worker import Worker
from worker_service.parallel.ranks import ALONE, Ranks
from worker_service.serving import adapter_calls
from worker_service.serving.adapters import drop_adapter, load_adapter
from worker_service.serving.device_thread import DeviceThread

__all__ = ["start"]  # a fixture

SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in {
        "self_attn.q_proj": (60, 48),
        "self_attn.k_proj": (20, 48),
        "self_attn.v_proj": (20, 48),
        "self_attn.o_proj": (48, 60),
        "mlp.up_proj": (100, 48),
        "mlp.down_proj": (48, 100),
    }.items()
}
"""Of the tiny model."""
ADAPTERS = [adapter_messages(random_adapter(SHAPES, rank, seed)) for seed, rank in enumerate((3, 8, 1))]
ONE, TWO, THREE = (messages[0].fingerprint for messages in ADAPTERS)
FLAGS = ("--max-loras", "2", "--max-lora-rank", "8", "--dtype", "float32")


class Session:
    """The scheduler's end of a session that is sent a step at a time."""

    def __init__(self, stub: WorkerServiceStub, epoch: int) -> None:
        self._epoch = epoch
        self._numbers, self._step_ids = itertools.count(1), itertools.count(1)
        self._steps: queue.SimpleQueue[pb.SchedulerOutput | None] = queue.SimpleQueue()
        self._answers = stub.Execute(iter(self._steps.get, None))

    def say(self, *adapters: str) -> list[list[int]]:
        """Six tokens of a sequence of each of these, all of them together."""
        ids = [next(self._numbers) for _ in adapters]
        new = [new_message(one, PROMPT, range(7 * place, 7 * place + 7)) for place, one in enumerate(ids)]
        for message, adapter in zip(new, adapters, strict=True):
            message.adapter_id = adapter
        found = [self._step(sequence_ids=ids, num_scheduled_tokens=[len(PROMPT)] * len(ids), new_sequences=new)]
        found += [self._step(sequence_ids=ids) for _ in range(5)]
        self._step(finished=ids)
        return [list(of_one) for of_one in zip(*found, strict=True)]

    def _step(self, **output: Any) -> Sequence[int]:
        self._steps.put(pb.SchedulerOutput(epoch=self._epoch, step_id=next(self._step_ids), **output))
        return next(self._answers).token_ids

    def close(self) -> None:
        self._steps.put(None)
        assert not list(self._answers)


def take(stub: WorkerServiceStub, number: int) -> None:
    stub.TakeAdapter(iter(ADAPTERS[number]))


def drop(stub: WorkerServiceStub, fingerprint: str) -> None:
    stub.DropAdapter(DropAdapterRequest(fingerprint=fingerprint))


def test_two_ranks_say_what_one_process_says_while_adapters_come_and_go(start: Any) -> None:
    """More of them than slots, some dropped and taken anew between the steps of others."""
    plain, ranked = start(1, *FLAGS), start(2, *FLAGS)
    with grpc.insecure_channel(plain.address) as one, grpc.insecure_channel(ranked.address) as two:
        alone, together = WorkerServiceStub(one), WorkerServiceStub(two)
        for number in range(3):
            take(alone, number)
        session = Session(alone, 1)
        expected = {name: session.say(name)[0] for name in (ONE, TWO, THREE, "")}
        assert len({tuple(tokens) for tokens in expected.values()}) == 4
        session.close()

        for number in range(2):
            take(together, number)
        session, over = Session(together, 1), threading.Event()
        assert session.say(ONE, "", TWO) == [expected[name] for name in (ONE, "", TWO)]
        said: list[list[list[int]]] = []

        def say_until_over() -> None:
            while not over.is_set():
                said.append(session.say(TWO, ""))

        saying = threading.Thread(target=say_until_over)
        saying.start()
        try:
            for _ in range(3):
                take(together, 2)
                drop(together, ONE)
                drop(together, THREE)
                take(together, 0)
                take(together, 2)
        finally:
            over.set()
            saying.join()
        assert said
        assert all(found == [expected[TWO], expected[""]] for found in said)
        for names in ((THREE, ONE), (TWO, "", TWO), (THREE, TWO), (ONE,)):
            assert session.say(*names) == [expected[name] for name in names]
        session.close()
        assert sorted(together.GetWorkerInfo(GetWorkerInfoRequest()).adapters) == sorted((ONE, TWO, THREE))


def test_what_is_refused_leaves_the_ranks_in_step(start: Any) -> None:
    worker = start(2, *FLAGS)
    with grpc.insecure_channel(worker.address) as channel:
        stub = WorkerServiceStub(channel)
        for number in range(3):
            take(stub, number)
        session = Session(stub, 1)
        expected = session.say(ONE, "")
        session.close()
        wide = {name: (outputs, inputs + 1) for name, (outputs, inputs) in SHAPES.items()}
        of_a_rank = {name: (outputs // 2, inputs) for name, (outputs, inputs) in SHAPES.items()}
        for shapes in (wide, of_a_rank):
            with pytest.raises(grpc.RpcError, match="where the model asks for") as error:
                stub.TakeAdapter(iter(adapter_messages(random_adapter(shapes, 2, 1))))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError, match="rank 9; this worker takes ranks from 1 to 8"):
            stub.TakeAdapter(iter(adapter_messages(random_adapter(SHAPES, 9, 1))))
        drop(stub, "of no adapter")
        drop(stub, TWO)
        for epoch, (names, sentence) in enumerate(
            [((TWO,), "is not loaded"), ((ONE, TWO), "is not loaded"), ((ONE, TWO, THREE), "a step has 3 adapters")], 2
        ):
            with pytest.raises(grpc.RpcError, match=sentence) as error:
                Session(stub, epoch).say(*names)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        session = Session(stub, 9)
        assert session.say(ONE, "") == expected
        session.close()


def test_a_rank_that_dies_while_an_adapter_comes_is_a_dead_worker(start: Any) -> None:
    worker = start(2, *FLAGS)
    with grpc.insecure_channel(worker.address) as channel:
        stub = WorkerServiceStub(channel)
        take(stub, 0)
        held = Session(stub, 1)
        held.say(ONE)
        begun, is_over = threading.Event(), threading.Event()

        def pieces() -> Iterator[TakeAdapterRequest]:
            yield ADAPTERS[1][0]
            begun.set()
            is_over.wait(60)
            yield from ADAPTERS[1][1:]

        taking = stub.TakeAdapter.future(pieces())
        assert begun.wait(60)
        worker.ranks[1].kill()
        is_over.set()
        with pytest.raises(grpc.RpcError):
            say_for_ever(held)
        taking.exception(SECONDS_TO_END)  # it ends as well
    assert worker.process.process.wait(SECONDS_TO_END) == 1
    assert worker.all_gone()


def say_for_ever(session: Session) -> None:
    while True:
        session.say(ONE)


class RecordingRanks(Ranks):
    """The first of two, where there is no other. Its second piece waits until it may be sent."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.orders: list[str] = []
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def send(self, epoch: int, message: bytes, drafts: Any = ()) -> None:
        self.orders += json.loads(message)
        if self.orders == ["piece", "piece"]:
            self.reached.set()
            assert self.may_go_on.wait(60)

    def broadcast(self, x: Tensor) -> Tensor:
        return x


async def messages(number: int) -> AsyncIterator[TakeAdapterRequest]:
    for message in ADAPTERS[number]:
        yield message


def with_slots(worker: Worker, ranks: Ranks = ALONE) -> Worker:
    model, engine = worker.runner.model, worker.runner.cache_engine
    adapters = Adapters(model, AdapterRoom(2, 8, 8))
    runner = ModelRunner(model, engine, adapters=adapters)
    return replace(worker, ranks=ranks, runner=runner, adapters=adapters, limits=replace(worker.limits, max_loras=2))


async def test_what_came_of_a_call_that_is_cut_off_is_forgotten_by_all_ranks(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one begins anew."""
    monkeypatch.setattr(rank_adapters, "PIECE_BYTES", 8 << 10)
    ranks, device_thread = RecordingRanks(), DeviceThread()
    ranked = with_slots(worker, ranks)
    taking = asyncio.create_task(load_adapter(ranked, device_thread, messages(0)))
    assert await asyncio.to_thread(ranks.reached.wait, 60)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert not ranked.adapters.fingerprints
    ranks.may_go_on.set()
    await load_adapter(ranked, device_thread, messages(0))
    drop_adapter(ranked, device_thread, ONE)
    await asyncio.wrap_future(device_thread.submit(lambda: None))
    assert ranks.orders == ["piece", "piece", "abandon", *["piece"] * 3, "hold", "drop"]
    assert not ranked.adapters._loaded


async def test_an_adapter_is_held_from_the_answer_on_though_the_device_is_busy(
    service: Service, worker: Worker
) -> None:
    """And no longer once it is dropped."""
    alone = with_slots(worker)
    service.servicer.set_ready(alone)
    with service.held():
        await service.stub.TakeAdapter(messages(0))
        assert list((await service.stub.GetWorkerInfo(GetWorkerInfoRequest())).adapters) == [ONE]
        await service.stub.DropAdapter(DropAdapterRequest(fingerprint=ONE))
        assert not (await service.stub.GetWorkerInfo(GetWorkerInfoRequest())).adapters
        await service.stub.TakeAdapter(messages(0))
        assert not alone.adapters._loaded
    await asyncio.wrap_future(service.servicer._device_thread.submit(lambda: None))
    assert list(alone.adapters._loaded) == [ONE]


async def test_an_adapter_that_is_dropped_serves_the_step_that_is_being_computed(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = with_slots(worker)
    service.servicer.set_ready(alone)
    await service.stub.TakeAdapter(messages(0))
    gate, session = Gate(alone, monkeypatch), service.session()
    new = new_message(1, PROMPT, range(8))
    new.adapter_id = ONE
    answering = asyncio.create_task(session.step(**prompt_step(new)))
    await gate.wait_until_entered()
    await service.stub.DropAdapter(DropAdapterRequest(fingerprint=ONE))
    gate.open.set()
    assert len((await answering).token_ids) == 1
    await session.send(sequence_ids=[1])
    code, details = await session.status()
    assert (code, "is not loaded" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


class Stalled:
    """A call whose scheduler sends the first piece, and then nothing more."""

    def __init__(self, service: Service, epoch: int = 0) -> None:
        self._first = TakeAdapterRequest(fingerprint=ONE, config=ADAPTERS[0][0].config, epoch=epoch)
        self.call = service.stub.TakeAdapter(self._pieces())

    async def _pieces(self) -> AsyncIterator[TakeAdapterRequest]:
        yield self._first
        await asyncio.Event().wait()

    async def has_begun(self, service: Service) -> None:
        while service.servicer._adapter_calls._handing is None:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def end(self) -> tuple[grpc.StatusCode, str | None]:
        async with asyncio.timeout(5):
            return await self.call.code(), await self.call.details()


async def test_a_call_that_stalls_keeps_no_other_from_its_adapter_and_ends(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = with_slots(worker)
    service.servicer.set_ready(alone)
    stalled = Stalled(service)
    await stalled.has_begun(service)
    await service.stub.TakeAdapter(messages(1), timeout=5)
    assert alone.adapters.fingerprints == [TWO]
    assert await stalled.end() == (grpc.StatusCode.ABORTED, "another call of TakeAdapter has begun")
    monkeypatch.setattr(adapter_calls, "STALL_SECONDS", 0.01)
    assert (await Stalled(service).end())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    empty = [TakeAdapterRequest(fingerprint=ONE), TakeAdapterRequest()]
    with pytest.raises(grpc.aio.AioRpcError, match="data: a piece after the first has none") as error:
        await service.stub.TakeAdapter(iter(empty))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_that_waits_for_another_to_end_is_over_if_a_session_begins_meanwhile() -> None:
    newest = 5
    calls = adapter_calls.AdapterCalls(lambda: newest)
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[TakeAdapterRequest]:
        yield TakeAdapterRequest(fingerprint=ONE, epoch=5)

    async def load(_: AsyncIterator[TakeAdapterRequest]) -> None:
        has_begun.set()
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()

    first = asyncio.create_task(calls.take(pieces(), load))
    await has_begun.wait()
    second = asyncio.create_task(calls.take(pieces(), load))
    while calls._handing is not None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    newest = 6
    calls.end_older()
    may_end.set()
    with pytest.raises(RequestError, match="epoch 5 is over: this worker has served epoch 6"):
        await second
    await first


async def test_calls_about_adapters_are_the_newest_sessions(service: Service, worker: Worker) -> None:
    """What one hands over that is older than the session that begins is not taken any more."""
    alone = with_slots(worker)
    service.servicer.set_ready(alone)
    older, newer = service.session(epoch=5), service.session(epoch=6)
    await older.step()
    stalled = Stalled(service, epoch=5)
    await stalled.has_begun(service)
    await newer.step()
    assert await stalled.end() == (grpc.StatusCode.ABORTED, "superseded by epoch 6")
    stale = [TakeAdapterRequest(fingerprint=ONE, config=ADAPTERS[0][0].config, epoch=5), *ADAPTERS[0][1:]]
    await service.stub.TakeAdapter(messages(1))
    drop_stale = DropAdapterRequest(fingerprint=TWO, epoch=5)
    for call in (service.stub.TakeAdapter(iter(stale)), service.stub.DropAdapter(drop_stale)):
        with pytest.raises(grpc.aio.AioRpcError, match="epoch 5 is over: this worker has served epoch 6") as error:
            await call
        assert error.value.code() is grpc.StatusCode.ABORTED
    assert alone.adapters.fingerprints == [TWO]
    for epoch in (6, 7):  # of the session that is open, and of one that is about to be
        await service.stub.DropAdapter(DropAdapterRequest(fingerprint=TWO, epoch=epoch))
    assert not alone.adapters.fingerprints
    await newer.close()
