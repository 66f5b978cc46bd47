"""Requests that come and go on a worker that launches steps before it knows the last ones' tokens: those of any worker.

Graphs are fakes, which compute anew what was recorded, and a step counts as under way for a while.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from embedding_helpers import assert_nothing_is_left
from engines import until
from fake_decode_graphs import FakeGraphs, with_fake_graphs
from scheduler_in_process import scheduler
from worker_in_process import ServedWorker, worker_in_process

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.execution.steps.running_step import RunningStep
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import SchedulerOutput

PREFIX = "Everything that these requests say begins with the same nine blocks of it. "
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"n": 2, "temperature": 0.9, "seed": 4}
]  # fmt: skip
WAITING: list[dict[str, Any]] = [
    {"beam_width": 2}, {"temperature": 0.7, "seed": 5, "logprobs": 1}, {"prompt_logprobs": 1, "temperature": 0},
    {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2},
]  # fmt: skip
"""Steps with such a request do not run ahead."""
COUNT, IN_FLIGHT = 40, 8


async def outputs(client: Client, number: int, room: asyncio.Semaphore) -> list[list[int]]:
    kind = WAITING[number // 10 % 4] if number % 10 == 0 else PLAIN[number % 3]
    prompt = f"{PREFIX if number % 3 else ''}{number} {'and so on ' * (number % 5)}"
    sampling = SamplingParams(max_tokens=10 + number % 30, ignore_eos=True, **kind)
    async with room:  # one comes when another goes
        return [output.token_ids for output in (await collect(client, prompt, sampling)).outputs]


async def all_outputs(worker: ServedWorker, model: Path, **settings: object) -> list[list[list[int]]]:
    async with (
        scheduler(worker.address, model=str(model), check_invariants=True, **settings) as one,
        Client(one.target) as client,
    ):
        await until(lambda: one.engine.workers.admits)
        room = asyncio.Semaphore(IN_FLIGHT)
        found = await asyncio.gather(*(outputs(client, number, room) for number in range(COUNT)))
        await assert_nothing_is_left(one)
        return found


class _Ahead(ModelRunner):
    """Counts the steps with prompts that were launched ahead."""

    num_prompts = 0

    def launch(
        self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk], before: RunningStep | None = None
    ) -> RunningStep:
        step = super().launch(output, chunks, before)
        self.num_prompts += before is not None and any(chunk.stop - chunk.start > 1 for chunk in chunks)
        step.launched_at = time.monotonic()  # type: ignore[attr-defined]
        return step


@pytest.mark.parametrize(("mode", "budget"), [("swap", 16), ("recompute", 512)])
async def test_requests_that_come_and_go_and_preempt_each_other_say_what_they_say_without(
    mode: str, budget: int, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in small chunks and whole, of one prefix and of their own."""
    scheduling = {"preemption_mode": mode, "max_num_batched_tokens": budget}
    async with worker_in_process(tiny_model_directory, num_gpu_blocks_override=40, swap_space=0.01) as worker:
        expected = await all_outputs(worker, tiny_model_directory, **scheduling)
    # A fake has computed a step when it is launched; else it would not be under way when the next one comes.
    monkeypatch.setattr(RunningStep, "is_done", lambda step: time.monotonic() > step.launched_at + 0.02)
    async with worker_in_process(tiny_model_directory, num_gpu_blocks_override=40, swap_space=0.01) as worker:
        plain = worker.worker.runner
        assert isinstance(plain, ModelRunner)
        faked = with_fake_graphs(plain, worker.worker.limits, record=FakeGraphs())
        runner = _Ahead(plain.model, plain.cache_engine, faked._decode_graphs, adapters=plain.adapters)
        monkeypatch.setattr(worker, "worker", replace(worker.worker, runner=runner))
        worker.servicer.set_ready(worker.worker)
        assert await all_outputs(worker, tiny_model_directory, **scheduling) == expected
    assert runner.num_prompts > 0
