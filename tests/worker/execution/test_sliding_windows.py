"""Blocks behind a window are reused, and no token changes: a scheduler's core and a worker, joined by codecs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from worker_helpers import LIMITS

from scheduler_service.core import (
    PreemptionMode,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    WaitingQueue,
)
from scheduler_service.wire.codec import decode_model_output, decode_worker_info, encode_scheduler_output
from worker_service.execution.worker import load_worker
from worker_service.serving.codec.answers import encode_model_output, encode_worker_info
from worker_service.serving.codec.steps import decode_scheduler_output
from worker_service.settings import WorkerSettings

WINDOW = 6
MODELS = {
    "native": {"model_type": "mistral", "sliding_window": WINDOW},
    "borrowed": {"model_type": "starcoder2", "sliding_window": WINDOW},
}


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(**MODELS[request.param])


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_requests_outgrow_a_pool_that_their_windows_fit(checkpoint: Path, mode: PreemptionMode) -> None:
    """Three contexts of 57 tokens, 15 blocks each, in a pool of 6: blocks behind a window belong to other sequences."""
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=LIMITS.block_size,
            num_device_blocks=6,
            num_host_blocks=LIMITS.num_host_blocks,
            max_num_batched_tokens=8,
            max_num_seqs=3,
            max_model_len=LIMITS.max_model_len,
            watermark=0.0,
            sliding_window=WINDOW,
            preemption_mode=mode,
        ),
        WaitingQueue(),
    )
    prompts = [PROMPT, PROMPT[::-1], PROMPT[10:]]
    groups = [
        SequenceGroup(str(number), prompt, SamplingParams(max_tokens=20), b"") for number, prompt in enumerate(prompts)
    ]
    for group in groups:
        scheduler.add_request(group)
    worker = SteppedWorker(load_runner(checkpoint))
    while scheduler.has_work:
        output = scheduler.schedule()
        message = encode_scheduler_output(output, epoch=1)
        step = decode_scheduler_output(message, LIMITS)
        answer = worker.execute(step)
        scheduler.update_from_output(output, decode_model_output(encode_model_output(1, step.step_id, answer)))
        scheduler.blocks.check()
    oracle = Oracle(checkpoint)
    for group, prompt in zip(groups, prompts, strict=True):
        assert group.sequences[0].token_ids[len(prompt) :] == oracle.greedy(prompt, 20)
    assert scheduler.num_preemptions[mode] > 0


@pytest.mark.parametrize(("max_model_len", "reported"), [(128, WINDOW), (WINDOW, 0)])
def test_a_worker_reports_the_window_where_it_makes_a_difference(
    max_model_len: int, reported: int, checkpoint: Path
) -> None:
    worker = load_worker(
        WorkerSettings(model=str(checkpoint), device="cpu", max_model_len=max_model_len, num_gpu_blocks_override=8)
    )
    message = encode_worker_info(worker.info, worker.limits, epoch=0)
    assert decode_worker_info(message).sliding_window == reported


def test_a_window_in_some_layers_is_not_reported(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(model_type="gemma2", layer_types=["sliding_attention", "full_attention"] * 2,
                           num_hidden_layers=4, sliding_window=WINDOW)  # fmt: skip
    assert (
        load_worker(WorkerSettings(model=str(path), device="cpu", num_gpu_blocks_override=8)).info.sliding_window == 0
    )
