"""Sessions of WorkerService over real gRPC: fenced by epoch and step, superseded, drained, or given up."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from message_helpers import new_message
from served_worker import PROMPT, Gate, Service, prompt_step

from pagewire.v1 import worker_service_pb2
from pagewire_common.calls.errors import RequestError
from worker_service.execution.worker import Worker
from worker_service.parallel.ranks import Ranks
from worker_service.serving.device_thread import DeviceThread
from worker_service.serving.servicer import WorkerServicer

SHUTTING_DOWN = (grpc.StatusCode.ABORTED, "the worker is shutting down")


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
async def test_an_old_epoch_is_refused_and_disturbs_no_session(old: int, service: Service) -> None:
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


async def test_no_epoch_makes_a_worker_unusable(service: Service) -> None:
    for epoch in (2**64 - 1, 2**63):
        hostile = service.session(epoch=epoch)
        await hostile.send()
        code, details = await hostile.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == f"epoch {epoch} is above {2**63 - 1}, and not the one after epoch 0"
    for epoch in (5, 2**63 - 1, 2**63, 2**63 + 1):
        client = service.session(epoch=epoch)
        await client.step(**prompt_step(new_message(1, PROMPT, range(10))))
        await client.close()


async def test_a_newer_session_ends_the_older_one_and_forgets_its_sequences(service: Service) -> None:
    older = service.session(epoch=1)
    await older.step(**prompt_step(new_message(1, PROMPT, range(10))))
    newer = service.session(epoch=2)
    await newer.step()
    assert await older.status() == (grpc.StatusCode.FAILED_PRECONDITION, "superseded by epoch 2")
    await newer.send(sequence_ids=[1])
    assert await newer.status() == (grpc.StatusCode.INVALID_ARGUMENT, "sequence 1 is not known")


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


async def test_ranks_that_were_sent_a_step_are_not_left_alone_with_it(
    service: Service, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the first rank's part of every sum, even if a newer session has replaced theirs meanwhile."""
    launched: list[int] = []
    launch = worker.runner.launch

    class FakeRanks(Ranks):
        def send(self, epoch: int, message: bytes, drafts: Sequence[Any] = ()) -> None:
            assert service.servicer._open is not None
            service.servicer._open.end = RequestError(grpc.StatusCode.FAILED_PRECONDITION, "superseded")

        def together(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    def note_and_launch(output: Any, chunks: Sequence[Any], before: Any) -> Any:
        launched.append(output.step_id)
        return launch(output, chunks, before)

    monkeypatch.setattr(worker.runner, "launch", note_and_launch)
    service.servicer.set_ready(replace(worker, ranks=FakeRanks(0, 2)))
    client = service.session()
    with service.held():
        await client.send()
        await client.send()
    await client.status()
    assert launched == [1]


async def test_a_worker_reports_whether_it_is_in_a_session_and_its_instance_id(service: Service) -> None:
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


async def test_draining_without_a_session_is_done_at_once(service: Service) -> None:
    await asyncio.wait_for(service.servicer.drain(60), 10)
