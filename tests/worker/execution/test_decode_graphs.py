"""Decodes from CUDA graphs are those of kernels launched one by one, and the host does not wait to launch them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stepped_worker import DEVICE, PROMPT, SteppedWorker, load_runner
from torch import Tensor
from worker_helpers import new_sequence, tokens

from worker_service.parallel.ranks import Ranks
from worker_service.session.step import BlockTableUpdate, SchedulerOutput

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")

SAMPLING = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 20, "seed": 8},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 9},
    {"logprobs": 3},
]


def _generate(worker: SteppedWorker) -> list[list[int]]:
    """Sequences come one after the other, change places and leave from the middle; what each step sampled."""
    live: list[int] = []
    answers = []
    for number in range(10):
        prompt = PROMPT[number : number + 3 + number % 4]
        new = new_sequence(number, prompt, range(4 * number, 4 * number + 4), **SAMPLING[number % len(SAMPLING)])
        answers.append(worker.step((number, len(prompt), True), new_sequences=(new,)).token_ids)
        live.append(number)
        if number % 4 == 3:
            worker.step(finished=(live.pop(1),))
        if number == 7:  # a block table that has changed, with the same length
            cache = worker.runner.cache_engine.device_blocks
            cache[60:64] = cache[28:32]
            cache[28:32] = float("nan")
            worker.step(block_table_updates=(BlockTableUpdate(7, 0, tokens(range(60, 64))),))
        live.reverse()
        answers.append(worker.step(*((sequence_id, 1, True) for sequence_id in live)).token_ids)
    return answers


def test_graphs_say_what_single_launches_say(tiny_checkpoint: Path) -> None:
    expected = _generate(SteppedWorker(load_runner(tiny_checkpoint, graphs=False)))
    found = _generate(SteppedWorker(load_runner(tiny_checkpoint)))
    assert found == expected
    assert len({token for step in found for token in step}) > 20


class _OneOverNccl(Ranks):
    """A single rank that nevertheless runs the sum over ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


def test_graphs_hold_the_sums_of_ranks(tiny_checkpoint: Path) -> None:
    expected = _generate(SteppedWorker(load_runner(tiny_checkpoint, graphs=False)))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _generate(SteppedWorker(load_runner(tiny_checkpoint, ranks=_OneOverNccl(0, 1)))) == expected
    finally:
        dist.destroy_process_group()


def test_a_steady_decode_is_launched_without_waiting_for_the_gpu(tiny_checkpoint: Path) -> None:
    worker = SteppedWorker(load_runner(tiny_checkpoint))
    for number in range(3):
        new = new_sequence(number, PROMPT, range(20 * number, 20 * number + 20), **SAMPLING[number])
        worker.step((number, len(PROMPT), True), new_sequences=(new,))
    for _ in range(2):
        worker.step((0, 1, True), (1, 1, True), (2, 1, True))
    session, before = worker.session, None
    for step_id in range(worker.step_id + 1, worker.step_id + 4):
        output = SchedulerOutput(1, step_id, (), (0, 1, 2), (1, 1, 1), (True, True, True))
        torch.cuda.set_sync_debug_mode("error")
        try:
            chunks = session.apply(output)
            running = worker.runner.launch(output, chunks, before)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        session.advance(chunks)
        before = running
    assert before is not None
    assert len(before.finish().token_ids) == 3
