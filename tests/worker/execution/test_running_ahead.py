"""A step that is launched before the one before it has finished samples what it would have sampled afterwards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_scripts import ROOM, add_adapter
from fake_decode_graphs import with_fake_graphs
from stepped_worker import DEVICE, PROMPT, SteppedWorker, load_runner
from worker_helpers import LIMITS, new_sequence, tokens

from worker_service.execution.steps.running_step import RunningStep
from worker_service.session.step import Fork, SchedulerOutput

SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "top_k": 20, "seed": 8}, {}]


@pytest.fixture
def worker(tiny_checkpoint: Path) -> SteppedWorker:
    runner = load_runner(tiny_checkpoint, room=ROOM)
    return SteppedWorker(with_fake_graphs(runner, LIMITS) if DEVICE.type == "cpu" else runner)


def _decode(step_id: int, *sequence_ids: int, **output: Any) -> SchedulerOutput:
    count = len(sequence_ids)
    return SchedulerOutput(1, step_id, (), sequence_ids, (1,) * count, (True,) * count, **output)


def _begin(worker: SteppedWorker, adapters: Sequence[str] = ("", "", "", "")) -> None:
    for number, (sampling, adapter) in enumerate(zip(SAMPLING, adapters, strict=True)):
        new = new_sequence(number, PROMPT[: 9 + number], range(15 * number, 15 * number + 15), **sampling)
        worker.step((number, 9 + number, True), new_sequences=(replace(new, adapter=adapter),))


PLANS = [
    [(0, 1, 2, 3)] * 6,
    [(0, 1, 2, 3), (3, 1), (1, 3, 0), (2,), (0, 1, 2, 3), (0, 1, 2, 3)],
]


@pytest.mark.parametrize("adapters", [("", "", "", ""), ("a", "", "b", "a")], ids=["the base", "adapters"])
@pytest.mark.parametrize("plan", PLANS, ids=["all in every step", "some in turn"])
def test_tokens_are_those_of_steps_that_wait_for_each_other(
    plan: list[tuple[int, ...]], adapters: tuple[str, ...], worker: SteppedWorker
) -> None:
    add_adapter(worker.runner, "a", rank=3, seed=1)
    add_adapter(worker.runner, "b", rank=8, seed=2)
    _begin(worker, adapters)
    expected = [worker.execute(_decode(worker.step_id + 1 + n, *ids)).token_ids for n, ids in enumerate(plan)]

    worker = SteppedWorker(worker.runner)
    _begin(worker, adapters)
    found = _run_ahead(worker, plan)
    assert found == expected
    assert len({token for step in found for token in step}) > 3


def test_prompts_beside_decodes_run_ahead_in_any_chunks(worker: SteppedWorker) -> None:
    add_adapter(worker.runner, "a", rank=3, seed=1)
    rows: list[list[tuple[int, int, bool]]] = [
        [(0, 1, True), (1, 1, True)],
        [(0, 1, True), (7, 5, False), (1, 1, True)],
        [(7, 12, True), (0, 1, True), (8, 16, False)],
        [(8, 1, True), (7, 1, True), (0, 1, True)],
        [(0, 1, True), (1, 1, True), (7, 1, True), (8, 1, True)],
    ]

    def steps(worker: SteppedWorker) -> list[SchedulerOutput]:
        _begin(worker, ("", "a", "", ""))
        coming = {
            1: (replace(new_sequence(7, PROMPT[:17], range(40, 46)), adapter="a"),),
            2: (new_sequence(8, PROMPT[3:20], range(50, 56)),),
        }
        return [
            SchedulerOutput(1, worker.step_id + 1 + number, coming.get(number, ()), *zip(*row, strict=True))
            for number, row in enumerate(rows)
        ]

    expected = [worker.execute(output).token_ids for output in steps(worker)]
    worker = SteppedWorker(worker.runner)
    assert _launch_ahead(worker, steps(worker)) == expected
    assert [len(step) for step in expected] == [2, 2, 2, 3, 4]


def _run_ahead(worker: SteppedWorker, plan: Sequence[tuple[int, ...]]) -> list[list[int]]:
    return _launch_ahead(worker, [_decode(worker.step_id + 1 + number, *ids) for number, ids in enumerate(plan)])


def _launch_ahead(worker: SteppedWorker, steps: Sequence[SchedulerOutput]) -> list[list[int]]:
    """Launch each step before the one before it is read."""
    session, before = worker.session, None
    found: list[list[int]] = []
    for output in steps:
        assert session.follows_unseen(output)
        chunks = session.apply(output)
        assert worker.runner.follow(chunks)
        running = worker.runner.launch(output, chunks, before)
        session.advance(chunks)
        if before is not None:
            found.append(_finish(worker, before))
        before = running
    assert before is not None
    found.append(_finish(worker, before))
    return found


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
    for number, sampling in ((8, {"logprobs": 1}), (8, {"prompt_logprobs": 1}), (8, {"logit_bias": {3: 1.0}}), (0, {})):
        new = new_sequence(number, PROMPT, range(2), **sampling)
        step = SchedulerOutput(1, 9, (new,), (1, number), (1, 5), (True, False))
        assert not session.follows_unseen(step), "a new sequence that reports, is edited, or is known"
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


def test_a_slot_is_filled_anew_behind_the_step_that_reads_it(worker: SteppedWorker) -> None:
    """Of three adapters in two slots, where no step has finished before the next is launched."""
    for number, name in enumerate("abc"):
        add_adapter(worker.runner, name, rank=3, seed=number)
    plan = [(0, 1), (2, 3), (1,), (3, 0), (2,), (0, 1)]
    _begin(worker, ("a", "b", "c", ""))
    expected = [worker.execute(_decode(worker.step_id + 1 + n, *ids)).token_ids for n, ids in enumerate(plan)]

    worker = SteppedWorker(worker.runner)
    _begin(worker, ("a", "b", "c", ""))
    assert _run_ahead(worker, plan) == expected
