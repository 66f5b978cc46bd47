"""A worker is lost in every way there is: its requests go on elsewhere, and their clients see a pause."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import OneProcess, running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SamplingParams, SchedulerConfig, SchedulerOutput, SequenceStatus
from scheduler_service.core import scheduler as planner
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.sessions import agreement, worker_loop, worker_session
from scheduler_service.engine.sessions.answer_check import check_answer
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.errors import DrainedError, WorkerError
from scheduler_service.engine.worker_link.limits import step_timeout
from scheduler_service.engine.worker_link.session import RoundTrips, Session, StepSplit
from scheduler_service.engine.workers import Worker, Workers, WorkerStatus
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.settings import SchedulerSettings

NEVER = 1000.0


def loop_of(engine: OneProcess, address: str) -> Worker:
    return next(loop for loop in engine.workers.all if loop.client.address == address)


async def start_on(worker: FakeWorkerService, engine: OneProcess, address: str, **sampling: Any) -> RequestState:
    """A request that one worker has begun to compute and not answered; the other workers serve again."""
    others = [loop for loop in engine.workers.all if loop.client.address != address]
    await until(lambda: all(loop.admits for loop in engine.workers.all))
    for other in others:
        engine.fleet.drain(other)
    await until(lambda: all(other.state is WorkerStatus.DRAINED for other in others))
    worker.runs.clear()
    state = await submit(engine, "a", [5, 6], **sampling)
    await until(lambda: loop_of(engine, address).epoch and worker.num_sessions == 1)
    await until(lambda: engine.workers.all and not engine.requests.waiting)
    for other in others:
        engine.fleet.undrain(other)
    await until(lambda: all(loop.admits for loop in others))
    return state


async def test_a_worker_that_hangs_is_noticed_by_its_health_also_in_a_step(byte_tokenizer_directory: Path) -> None:
    """As a stopped process does: the connection stands, and nothing comes."""
    bad, good = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    async with (
        serving(bad) as first,
        serving(good) as second,
        running(first, second, health_interval=0.05, step_timeout=NEVER) as engine,
    ):
        state = await start_on(bad, engine, first)
        bad.is_well.clear()
        assert await text_of(engine, state) == "ggggg"
        assert good.num_steps - 5 in (0, 1)  # a last one may tell it that the request has ended
        assert "failed 3 health checks in a row, of 0.05 s each" in loop_of(engine, first).last_error
        assert loop_of(engine, first).num_losses == 1


async def test_a_worker_that_hangs_is_noticed_while_it_has_nothing_to_do(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, health_interval=0.05) as engine:
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        worker.is_well.clear()
        await until(lambda: loop.num_losses)
        assert loop.state is WorkerStatus.CONNECTING
        worker.is_well.set()
        assert await text_of(engine, await submit(engine, "a", [5])) == "ggggg"


async def test_a_step_past_its_time_is_given_up_however_well_the_worker_says_it_is(
    byte_tokenizer_directory: Path,
) -> None:
    bad, good = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    async with (
        serving(bad) as first,
        serving(good) as second,
        running(first, second, health_interval=NEVER, step_timeout=0.5) as engine,
    ):
        state = await start_on(bad, engine, first)
        assert await text_of(engine, state) == "ggggg"
        assert "not answered a step for 0.5 s" in loop_of(engine, first).last_error
        assert loop_of(engine, second).num_losses == 0


def test_the_time_of_a_step_begins_when_the_worker_can_begin_with_it() -> None:
    """Two steps in flight may take twice the time of one."""
    trips = RoundTrips(StepSplit())
    assert trips.waiting_since is None
    trips.sent(10)
    trips.sent(20)
    assert trips.waiting_since == 10
    trips.answered(50, pb.StepTiming())
    assert trips.waiting_since == 50
    trips.answered(60, pb.StepTiming())
    assert trips.waiting_since is None
    trips.sent(70)
    assert trips.waiting_since == 70


def test_a_worker_whose_largest_step_takes_long_is_given_ten_times_that() -> None:
    settings = SchedulerSettings(step_timeout=60)
    config = SchedulerConfig(
        block_size=16, num_device_blocks=64, max_num_batched_tokens=2048, max_num_seqs=8, max_model_len=64
    )
    assert step_timeout(settings, config) == 60
    quick = SchedulerConfig(**{**_fields(config), "prefill_tokens_per_second": 5000})
    assert step_timeout(settings, quick) == 60
    slow = SchedulerConfig(**{**_fields(config), "prefill_tokens_per_second": 32})
    assert step_timeout(settings, slow) == 640


def _fields(config: SchedulerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _change(**fields: Any) -> Callable[[pb.ModelOutput], pb.ModelOutput]:
    def change(answer: pb.ModelOutput) -> pb.ModelOutput:
        changed = pb.ModelOutput(**fields)
        for name, _ in changed.ListFields():
            answer.ClearField(name.name)
        answer.MergeFrom(changed)
        return answer

    return change


def _logprobs(*logprobs: float, token_ids: tuple[int, ...] = (73, 1), ranks: tuple[int, ...] = (1,)) -> Any:
    columns = pb.SampleLogprobs(sequence_id=1, width=2, token_ids=token_ids, logprobs=logprobs, ranks=ranks)
    return _change(logprobs=[columns])


_UNASKED = pb.SampleLogprobs(sequence_id=1, width=1, token_ids=[73], logprobs=[-1.0], ranks=[1])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_change(token_ids=[259]), "sampled token 259 of a vocabulary of 259"),
        (_change(token_ids=[1, 2]), "returned 2 tokens for 1 samples"),
        (_change(token_ids=[1, 2], num_tokens=[2]), "returned 2 tokens for sequence 1"),
        (_change(num_tokens=[3]), "do not divide"),
        (_change(step_id=7), "answered step 7 instead of step 1"),
        (_change(epoch=7), "answered for epoch 7"),
        (lambda answer: pb.ModelOutput(epoch=answer.epoch, step_id=answer.step_id), "returned 0 tokens for 1 samples"),
        (_change(), "returned log-probabilities of 0 tokens for sequence 1, which gained 1"),
        (_logprobs(-1.0, float("nan")), "invalid log-probabilities"),
        (_logprobs(float("inf"), -1.0), "invalid log-probabilities"),
        (_logprobs(-1.0, -2.0, token_ids=(73, 259)), "invalid log-probabilities"),
        (
            _logprobs(-1.0, -2.0, -3.0, -4.0, token_ids=(1, 2, 3, 4), ranks=(1, 2)),
            "log-probabilities of 2 tokens for sequence 1",
        ),
        (_change(logprobs=[_UNASKED]), "log-probabilities for sequence 1, which asked for none"),
        (_change(prompt_logprobs=[_UNASKED]), "log-probabilities of a prompt for sequence 1, which asked for none"),
        (_change(vectors=[pb.SequenceVectors(sequence_id=1, data=bytes(4))]), "vectors for sequence 1, which asked"),
        (_logprobs(-1.0), "columns of different lengths"),
        (lambda _: b"\xff\xff\xff", "something that is no ModelOutput"),
    ],
)
async def test_an_answer_that_makes_no_sense_costs_its_worker_the_session_and_no_request_a_token(
    spoil: Any, reason: str, byte_tokenizer_directory: Path
) -> None:
    bad, good = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    async with serving(bad) as first, serving(good) as second, running(first, second) as engine:
        wants_logprobs = ("log-probabilities" in reason or "columns" in reason) and "asked" not in reason
        state = await start_on(bad, engine, first, logprobs=1 if wants_logprobs else None)
        bad.spoil, good.spoil = spoil, _add_logprobs if wants_logprobs else good.spoil
        bad.runs.set()
        tokens: list[int] = []
        async for delta in state.stream:
            tokens += delta.token_ids
        assert tokens == [73] * 5
        assert reason in loop_of(engine, first).last_error
        assert loop_of(engine, first).num_losses >= 1
        await engine.close(state)


@pytest.mark.parametrize("says", ["failed", "nan", "inf"])
@pytest.mark.parametrize("sampling", [{}, {"beam_width": 2}, {"n": 2}], ids=["one", "beams", "two"])
async def test_a_prompt_without_log_probabilities_costs_the_output_that_asked_for_them_alone(
    says: str, sampling: dict[str, Any], byte_tokenizer_directory: Path
) -> None:
    """The prompt takes two steps, and the answer to the first, before there is a token, already reports it."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        await until(lambda: engine.workers.admits)
        other = await submit(engine, "other", [5], max_tokens=50)
        streamed = asyncio.create_task(text_of(engine, other))

        def spoil(answer: pb.ModelOutput) -> pb.ModelOutput:
            if says == "failed":
                answer.failed_sequence_ids.append(2)
            else:
                answer.prompt_logprobs.add(sequence_id=2, width=1, token_ids=[1], logprobs=[float(says)], ranks=[1])
            return answer

        worker.spoil = spoil
        state = await submit(engine, "spoilt", [6] * 200, prompt_logprobs=0, **sampling)
        if "n" in sampling:  # the first asked for them; its prompt was not computed to the end for the second
            ends = {
                delta.index: (delta.status, delta.num_output_tokens) async for delta in state.stream if delta.status
            }
            assert ends == {0: (SequenceStatus.FINISHED_FAILED, 0), 1: (SequenceStatus.FINISHED_LENGTH_CAPPED, 5)}
            await engine.close(state)
        else:
            with pytest.raises(RequestError, match="the model's output was not finite") as error:
                await text_of(engine, state)
            assert error.value.code is grpc.StatusCode.INTERNAL
        assert await streamed == "g" * 50
        assert worker.num_sessions == 1
        assert loop_of(engine, address).num_losses == 0
        await until(lambda: loop_of(engine, address).scheduler.blocks.device.num_free == 64)


async def test_what_would_fail_behind_a_stop_string_never_counts(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not hear in time that an output ended by its stop string."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        await until(lambda: engine.workers.admits)
        say = engine.link.connection.say
        monkeypatch.setattr(
            engine.link.connection, "say", lambda call, **event: None if "stop_output" in event else say(call, **event)
        )

        def spoil(answer: pb.ModelOutput) -> pb.ModelOutput:
            if worker.num_steps == 3:
                answer.failed_sequence_ids.append(1)
                answer.barred_sequence_ids.append(1)
            return answer

        worker.spoil = spoil
        sampling = SamplingParams(max_tokens=40, n=2)
        request = GenerationRequest(request_id="a", prompt_token_ids=[5], sampling=sampling, stop=("gg",))
        state = await engine.submit(request)
        ends = {delta.index: delta.stop async for delta in state.stream if delta.status}
        assert ends == {0: "gg", 1: "gg"}
        assert worker.num_steps >= 3
        await engine.close(state)


def _add_logprobs(answer: pb.ModelOutput) -> pb.ModelOutput:
    for number, _ in enumerate(answer.token_ids):
        answer.logprobs.add(sequence_id=number + 1, width=2, token_ids=[73, 1], logprobs=[-1.0, -2.0], ranks=[1])
    return answer


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
async def test_a_request_that_brings_down_every_worker_is_ended_before_the_fleet_is(
    status: grpc.StatusCode, byte_tokenizer_directory: Path
) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory, poison=99) for _ in range(3)]
    for worker in workers:
        worker.poison_status = status
    async with (
        serving(workers[0]) as first,
        serving(workers[1]) as second,
        serving(workers[2]) as third,
        running(first, second, third) as engine,
    ):
        await until(lambda: all(loop.admits for loop in engine.workers.all))
        neighbours = [
            asyncio.create_task(text_of(engine, await submit(engine, str(number), [5, 6], max_tokens=40, n=2)))
            for number in range(12)
        ]
        poison = await submit(engine, "poison", [5, 99])
        with pytest.raises(RequestError, match="workers failed in a row while computing this request") as error:
            await text_of(engine, poison)
        assert error.value.code is grpc.StatusCode.INTERNAL
        assert await asyncio.gather(*neighbours) == ["g" * 80] * 12
        assert sum(loop.num_losses for loop in engine.workers.all) >= 5


async def test_losing_workers_that_do_nothing_makes_no_request_a_suspect(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, health_interval=0.02, step_timeout=NEVER) as engine:
        (loop,) = engine.workers.all
        for number in range(1, 4):
            await until(lambda: loop.admits)
            worker.is_well.clear()
            await until(lambda number=number: loop.num_losses == number)  # type: ignore[misc]
            worker.is_well.set()
        state = await submit(engine, "a", [5])
        assert engine.group(state).suspicion is None
        assert await text_of(engine, state) == "ggggg"


@pytest.mark.parametrize("code", [grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION])
async def test_a_session_that_the_worker_ends_in_good_order_makes_no_request_a_suspect(
    code: grpc.StatusCode, byte_tokenizer_directory: Path
) -> None:
    """The worker is shut down, or another scheduler has it now."""
    worker = FakeWorkerService(byte_tokenizer_directory, poison=99)
    worker.poison_status = code
    async with serving(worker) as address, running(address) as engine:
        state = await submit(engine, "a", [5, 99])
        await until(lambda: worker.num_sessions == 5)
        assert engine.group(state).suspicion is None
        worker.poison = None
        assert await text_of(engine, state) == "ggggg"


class Quitter(FakeWorkerService):
    """Ends each session in good order after five steps, however many more are on their way."""

    async def Execute(self, requests: AsyncIterator[pb.SchedulerOutput], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for answer in super().Execute(requests, context):
            yield answer
            if answer.step_id == 5:
                await context.abort(grpc.StatusCode.ABORTED, "it is shut down")


async def test_how_a_session_ended_is_known_however_many_steps_were_being_sent(byte_tokenizer_directory: Path) -> None:
    async def send(session: Session) -> None:
        for step_id in itertools.count(1):
            await session.send(SchedulerOutput(step_id=step_id))

    async def receive(session: Session) -> None:
        while True:
            await session.receive()

    async with serving(Quitter(byte_tokenizer_directory)) as address:
        client = WorkerClient(address)
        for epoch in range(1, 51):
            session = client.open_session(epoch, StepSplit())
            ends = await asyncio.gather(send(session), receive(session), return_exceptions=True)
            assert list(map(type, ends)) == [DrainedError, DrainedError], ends
        await client.close()


async def test_the_servers_own_end_makes_no_request_a_suspect(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address:
        async with running(address) as engine:
            worker.runs.clear()
            state = await submit(engine, "a", [5])
            group = engine.group(state)
            await until(lambda: not engine.requests.waiting)
        assert group.suspicion is None


async def test_a_worker_that_spoils_everything_is_tried_less_and_less_while_others_serve(
    byte_tokenizer_directory: Path,
) -> None:
    """Otherwise it would take the next request in the queue, again and again, until that ends as a suspect."""
    bad, good = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    bad.spoil = _change(token_ids=[999])
    async with serving(bad) as first, serving(good) as second, running(first, second) as engine:
        await until(lambda: all(loop.admits for loop in engine.workers.all))
        for batch in range(10):
            states = [await submit(engine, f"{batch} {number}", [5] * 30) for number in range(30)]
            assert await asyncio.gather(*(text_of(engine, state) for state in states)) == ["ggggg"] * 30
        assert bad.num_sessions <= 2


async def test_an_error_in_one_workers_loop_is_that_workers_alone(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory) for _ in range(2)]
    async with serving(workers[0]) as first, serving(workers[1]) as second, running(first, second) as engine:
        await until(lambda: all(loop.admits for loop in engine.workers.all))
        loop = loop_of(engine, first)
        monkeypatch.setattr(loop.scheduler, "schedule", lambda _: 1 / 0)
        states = [await submit(engine, str(number), [5]) for number in range(20)]
        assert await asyncio.gather(*(text_of(engine, state) for state in states)) == ["ggggg"] * 20
        await until(lambda: "internal error" in loop.last_error)
        await until(lambda: loop.admits)


async def test_an_error_of_our_own_is_no_evidence_against_a_request(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([TypeError("ours")])

    def check(*arguments: Any) -> None:
        for error in errors:
            raise error
        check_answer(*arguments)

    worker = FakeWorkerService(byte_tokenizer_directory)
    monkeypatch.setattr(worker_loop, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(worker_session, "check_answer", check)
    async with serving(worker) as address, running(address) as engine:
        state = await submit(engine, "a", [5], max_tokens=2)
        group = engine.group(state)
        assert await text_of(engine, state) == "gg"
        assert group.suspicion is None
        assert worker.num_sessions == 2


async def test_a_worker_that_does_not_send_its_tokenizer_keeps_no_other_waiting(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = asyncio.Event()

    class Stalled(FakeWorkerService):
        async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            is_asked.set()
            await asyncio.Event().wait()
            yield

    class Second(FakeWorkerService):
        async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb.GetWorkerInfoResponse:  # noqa: N802
            await is_asked.wait()
            return await super().GetWorkerInfo(request, context)

    monkeypatch.setattr(agreement, "LONG_FETCH_SECONDS", 0.01)
    stalled, good = Stalled(byte_tokenizer_directory), Second(byte_tokenizer_directory)
    async with serving(stalled) as first, serving(good) as second, running(first, second, time_limit=10) as engine:
        assert await text_of(engine, await submit(engine, "a", [5])) == "ggggg"


async def test_a_worker_whose_newest_epoch_is_the_last_gets_no_session(byte_tokenizer_directory: Path) -> None:
    """And nothing is ready because of it."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.epoch = 2**64 - 1
    async with serving(worker) as address, running(address) as engine:
        (loop,) = engine.workers.all
        await until(lambda: "no session can be newer: restart the worker" in loop.last_error)
        assert not engine.workers.serving
        assert not worker.num_sessions
        worker.info.epoch = 2**63 + 5
        await until(lambda: engine.workers.serving)
        assert loop.epoch == 2**63 + 6


async def test_a_long_pause_does_not_outlive_its_reason(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that failed in step after step is gone by now: it is tried as any other worker that is gone.

    Pauses are shortened by a random share, so that schedulers that lost it together do not return together.
    """
    pauses: list[float] = []
    engine = Engine(SchedulerSettings(workers=["gone:1"], model="fake"))
    (worker,) = engine.workers.all
    loop = worker_loop.WorkerLoop(engine.fleet, worker)

    async def serve() -> None:
        loop._is_lost_in_a_step = len(pauses) < 3
        raise WorkerError("no")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        worker.is_wanted = len(pauses) < 4

    monkeypatch.setattr(loop, "_serve", serve)
    monkeypatch.setattr(Workers, "admits", True)
    monkeypatch.setattr(worker_loop.asyncio, "sleep", sleep)
    await loop.run()
    shares = [pause / longest for pause, longest in zip(pauses, (5, 10, 20, 2), strict=True)]
    assert all(0.5 <= share <= 1 for share in shares)
    assert len(set(shares)) == len(shares)
    await worker.client.close()


async def test_what_a_worker_says_of_its_failure_is_kept_short(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(SchedulerSettings(workers=["gone:1"], model="fake"))
    (worker,) = engine.workers.all
    loop = worker_loop.WorkerLoop(engine.fleet, worker)

    async def serve() -> None:
        worker.is_wanted = False
        raise WorkerError("x" * 1_000_000)

    monkeypatch.setattr(loop, "_serve", serve)
    await loop.run()
    assert 100 <= len(worker.last_error) <= 1000
    await worker.client.close()


async def test_a_session_that_cannot_begin_leaves_nothing_behind_that_breaks_the_others(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory) for _ in range(2)]
    async with serving(workers[0]) as first, serving(workers[1]) as second, running(first, second) as engine:
        await until(lambda: all(loop.admits for loop in engine.workers.all))
        loop = loop_of(engine, first)
        engine.fleet.drain(loop)
        await until(lambda: loop.state is WorkerStatus.DRAINED)
        closed: list[Session] = []
        close = Session.close
        with monkeypatch.context() as patch:
            patch.setattr(planner, "BlockManager", lambda *_, **__: 1 / 0)
            patch.setattr(Session, "close", lambda session: closed.append(session) or close(session))
            engine.fleet.undrain(loop)
            await until(lambda: closed)
            assert len(engine.requests.waiting.balancer) == 1
            assert await text_of(engine, await submit(engine, "a", [5])) == "ggggg"
        await until(lambda: loop.admits)
        assert len(engine.requests.waiting.balancer) == 2
