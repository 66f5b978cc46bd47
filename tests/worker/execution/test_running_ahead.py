"""A step that is launched before the one before it has finished samples what it would have sampled afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_decode_graphs import FakeDecodeGraphs
from stepped_worker import DEVICE, PROMPT, SteppedWorker, load_runner
from worker_helpers import LIMITS, new_sequence, tokens

from worker_service.execution.model_runner import ModelRunner, RunningStep
from worker_service.session.step import Fork, SchedulerOutput

SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "top_k": 20, "seed": 8}, {}]


@pytest.fixture
def worker(tiny_checkpoint: Path) -> SteppedWorker:
    runner = load_runner(tiny_checkpoint)
    if DEVICE.type == "cpu":
        cache = runner.cache_engine.device_blocks
        graphs = FakeDecodeGraphs(runner.model, cache, LIMITS.max_num_seqs, LIMITS.max_model_len)
        runner = ModelRunner(runner.model, runner.cache_engine, graphs)  # type: ignore[arg-type]
    return SteppedWorker(runner)


def _decode(step_id: int, *sequence_ids: int, **output: Any) -> SchedulerOutput:
    count = len(sequence_ids)
    return SchedulerOutput(1, step_id, (), sequence_ids, (1,) * count, (True,) * count, **output)


def _begin(worker: SteppedWorker) -> None:
    for number, sampling in enumerate(SAMPLING):
        new = new_sequence(number, PROMPT[: 9 + number], range(15 * number, 15 * number + 15), **sampling)
        worker.step((number, 9 + number, True), new_sequences=(new,))


PLANS = [
    [(0, 1, 2, 3)] * 6,
    [(0, 1, 2, 3), (3, 1), (1, 3, 0), (2,), (0, 1, 2, 3), (0, 1, 2, 3)],
]


@pytest.mark.parametrize("plan", PLANS, ids=["all in every step", "some in turn"])
def test_tokens_are_those_of_steps_that_wait_for_each_other(worker: SteppedWorker, plan: list[tuple[int, ...]]) -> None:
    _begin(worker)
    expected = [worker.execute(_decode(worker.step_id + 1 + n, *ids)).token_ids for n, ids in enumerate(plan)]

    worker = SteppedWorker(worker.runner)
    _begin(worker)
    session, before = worker.session, None
    found: list[list[int]] = []
    for number, ids in enumerate(plan):
        output = _decode(worker.step_id + 1 + number, *ids)
        assert session.follows_unseen(output)
        chunks = session.apply(output)
        running = worker.runner.launch(output, chunks, before)
        session.advance(chunks)
        if before is not None:
            found.append(_finish(worker, before))
        before = running
    assert before is not None
    found.append(_finish(worker, before))
    assert found == expected
    assert len({token for step in found for token in step}) > 3


def _finish(worker: SteppedWorker, running: RunningStep) -> list[int]:
    answer = running.finish()
    worker.session.fill_in(running.chunks, answer.token_ids)
    return answer.token_ids


def test_what_needs_the_values_of_tokens_does_not_run_ahead(worker: SteppedWorker) -> None:
    _begin(worker)
    session = worker.session
    plain = _decode(worker.step_id + 1, 0, 1, 2, 3)
    assert session.follows_unseen(plain)
    assert not session.follows_unseen(_decode(9, 0, 77)), "an unknown sequence"
    assert not session.follows_unseen(SchedulerOutput(1, 9, (), (0,), (2,), (True,))), "two tokens"
    new = new_sequence(8, PROMPT, range(2))
    assert not session.follows_unseen(SchedulerOutput(1, 9, (new,), (0,), (1,), (True,))), "a new sequence"
    fork = Fork(0, 9, 10, 9, tokens(range(3)), 1)
    assert not session.follows_unseen(_decode(9, 0, forks=(fork,))), "a fork copies tokens"
    for number, sampling in enumerate(
        ({"repetition_penalty": 1.2}, {"bad_words": ((3, 4),)}, {"min_tokens": 3, "eos_token_ids": (1,)})
    ):
        penalised = new_sequence(20 + number, PROMPT[:4], range(60, 64), **sampling)
        worker.step((20 + number, 4, True), new_sequences=(penalised,))
        assert not session.follows_unseen(_decode(9, 0, 20 + number))


def test_a_row_that_fails_goes_on_from_the_placeholder(worker: SteppedWorker) -> None:
    _begin(worker)
    session, runner = worker.session, worker.runner
    first = _decode(worker.step_id + 1, 0, 1)
    chunks = session.apply(first)
    runner.cache_engine.device_blocks[0] = torch.nan
    running = runner.launch(first, chunks)
    session.advance(chunks)
    second = _decode(worker.step_id + 2, 0, 1)
    more = session.apply(second)
    ahead = runner.launch(second, more, running)
    session.advance(more)
    answer = running.finish()
    assert answer.failed_sequence_ids == [0]
    assert answer.token_ids[0] == 0
    assert ahead.finish().failed_sequence_ids == [0]
