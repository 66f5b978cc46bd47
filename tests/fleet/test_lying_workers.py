"""A worker that sends wrong messages: its session ends, and another worker computes its requests."""

from collections.abc import Callable

import grpc
import pytest
from fleet_helpers import Serve
from meddler import Meddler
from processes import Workers

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub


def changed(answer: pb.ModelOutput, **fields: object) -> pb.ModelOutput:
    lie = pb.ModelOutput()
    lie.CopyFrom(answer)
    for name, value in fields.items():
        lie.ClearField(name)
        lie.MergeFrom(pb.ModelOutput(**{name: value}))
    return lie


LIES: dict[str, Callable[[pb.ModelOutput], pb.ModelOutput | bytes]] = {
    "bytes that are no message": lambda answer: b"\xff\xfe\xfd",
    "nothing": lambda answer: pb.ModelOutput(),
    "a token outside the vocabulary": lambda answer: changed(answer, token_ids=[*answer.token_ids[:-1], (1 << 32) - 1]),
    "a token too few": lambda answer: changed(answer, token_ids=answer.token_ids[:-1]),
    "a token too many": lambda answer: changed(answer, token_ids=[*answer.token_ids, 5]),
    "shares that do not add up": lambda answer: changed(answer, num_tokens=[2] * len(answer.token_ids)),
    "another step's answer": lambda answer: changed(answer, step_id=answer.step_id - 1),
    "an older session's answer": lambda answer: changed(answer, epoch=answer.epoch - 1),
}


async def tell(meddler: Meddler, name: str) -> None:
    """Tell a lie once, in an answer that carries tokens, and return when the next session has begun.

    It is not the session's first answer: a worker that answers no step at all is left alone for seconds.
    """
    num_honest = 0

    def lie(answer: pb.ModelOutput) -> pb.ModelOutput | bytes:
        nonlocal num_honest
        if not answer.token_ids or not num_honest:
            num_honest += bool(answer.token_ids)
            return answer
        meddler.on_answer = lambda answer: answer
        return LIES[name](answer)

    lies, sessions = meddler.num_lies, meddler.num_sessions
    meddler.on_answer = lie
    await meddler.until(lambda: meddler.num_lies > lies and meddler.num_sessions > sessions)


async def test_garbage_ends_the_session_and_reaches_no_stream(workers: Workers, serve: Serve) -> None:
    honest, crooked = workers.up(2)
    async with Meddler(crooked.address).serving() as meddler:
        fleet = await serve([meddler.address, honest.address])
        async with fleet.load() as load:
            for name in LIES:
                print(f"the lie is {name}")  # noqa: T201
                await tell(meddler, name)
                await load.gain(50)
        await fleet.check_empty()


@pytest.mark.parametrize("fault", ["a gap", "a stale epoch"])
async def test_a_worker_refuses_steps_out_of_turn(fault: str, workers: Workers, serve: Serve) -> None:
    """A step that is lost on its way, or one of an earlier session: nothing is computed after it."""
    honest, other = workers.up(2)
    async with Meddler(other.address).serving() as meddler:
        fleet = await serve([meddler.address, honest.address], "--step-timeout", "10")

        seen: list[pb.SchedulerOutput] = []  # from the fault on, in its session

        def meddle(step: pb.SchedulerOutput) -> pb.SchedulerOutput | None:
            if seen and step.epoch != seen[0].epoch and not meddler.session_errors:
                seen.clear()  # the lost step was the last of its requests, and none followed: once more
            if step.step_id < 10 or (seen and step.epoch != seen[0].epoch):
                return step
            seen.append(step)
            # Nothing follows the step that is refused: gRPC's client forgets how the worker ended a stream when a
            # write meets the end.
            if fault == "a gap":
                return step if len(seen) == 2 else None
            if len(seen) > 1:
                return None
            stale = pb.SchedulerOutput()
            stale.CopyFrom(step)
            stale.epoch -= 1
            return stale

        async with fleet.load() as load:
            await load.gain(100)
            meddler.on_step = meddle
            await meddler.until(lambda: bool(meddler.session_errors))
            await load.gain(100)
        assert meddler.session_errors[0][0] is grpc.StatusCode.FAILED_PRECONDITION
        await fleet.check_empty()


async def test_a_stale_session_is_refused_and_the_one_that_runs_goes_on(workers: Workers, serve: Serve) -> None:
    (member,) = workers.up(1)
    fleet = await serve([member.address])
    async with fleet.load(8) as load, grpc.aio.insecure_channel(member.address) as channel:
        await load.gain(100)
        epoch = (await fleet.state()).workers[0].epoch
        stale = WorkerServiceStub(channel).Execute()
        await stale.write(pb.SchedulerOutput(epoch=epoch - 1, step_id=1))
        assert await stale.code() is grpc.StatusCode.FAILED_PRECONDITION
        await load.gain(100)
        state = await fleet.state()
        assert state.workers[0].epoch == epoch
    await fleet.check_empty()
