"""Guesses change nothing but speed: the tokens are those without them, whatever is asked for and whatever happens."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import until
from fake_worker_service import TOKEN, FakeWorkerService, serving
from scheduler_in_process import scheduler
from speculating import (
    ASKED,
    FORMED,
    KINDS,
    Oracle,
    Plain,
    guesses_after_a_loss,
    guesses_alone_and_together,
    num_preemptions,
    speculating,
)
from tiny_model import write_tiny_llama

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from scheduler_service import core
from scheduler_service.core import Scheduler, SequenceGroup, WaitingQueue
from scheduler_service.engine.worker_link.limits import check_limits, model_limits, scheduler_config
from scheduler_service.frontend.checking.sampling_validation import _max_tokens
from scheduler_service.frontend.model import ServedModel
from scheduler_service.recording.replayer import Replayer
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import WorkerInfo, decode_worker_info
from worker_service.speculation import ngram


@pytest.fixture
def oracle(all_verified: None, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "draft", Oracle(plain.sequences).guess)


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("num_device_blocks", [128, 40])
async def test_outputs_are_the_same_alone_and_together_and_through_preemption(
    num_device_blocks: int, plain: Plain, tiny_model_directory: Path, tmp_path: Path
) -> None:
    """And every decision can be replayed."""
    recording = tmp_path / "recording"
    async with speculating(tiny_model_directory, recording, num_gpu_blocks_override=num_device_blocks) as one:
        guesses = await guesses_alone_and_together(
            one, list(zip(ASKED, plain.answers, strict=True)), len(KINDS | FORMED)
        )
        assert num_preemptions(one) > 0 or num_device_blocks > 40
    assert guesses.right.num_tokens > 2000
    assert guesses.verified.num_tokens > guesses.right.num_tokens + 50
    replayed = [moment.step.output for moment in Replayer().run(recording) if moment.kind == "plan" and moment.step]
    assert sum(bool(output.num_draft_tokens) for output in replayed) > 10


@pytest.mark.usefixtures("oracle")
async def test_outputs_are_the_same_when_workers_are_lost(plain: Plain, tiny_model_directory: Path) -> None:
    other = await guesses_after_a_loss(
        plain.without_beams, tiny_model_directory, speculative_config={"method": "ngram"}
    )
    assert other.right.num_tokens > 20


@pytest.mark.usefixtures("all_verified")
@pytest.mark.parametrize("num_device_blocks", [128, 40])
async def test_a_draft_model_that_is_the_target_is_right_whatever_is_asked_for(
    num_device_blocks: int, plain: Plain, tiny_model_directory: Path
) -> None:
    """It draws with the same noise. Its cache goes with the target's through forks, copies, prefixes and swaps: a slot
    of another token would make it wrong. A form is all that it does not know."""
    free = [(asked, wanted) for asked, wanted in zip(ASKED, plain.answers, strict=True) if asked[1] in KINDS.values()]
    config = {"method": "draft_model", "model": str(tiny_model_directory)}
    draft = {"speculative_config": config, "num_gpu_blocks_override": num_device_blocks}
    async with speculating(tiny_model_directory, **draft) as one:
        guesses = await guesses_alone_and_together(one, free, len(KINDS))
        assert num_preemptions(one) > 0 or num_device_blocks > 40
    assert guesses.verified.num_tokens > 1500
    assert guesses.right.by_position() == guesses.verified.by_position()


@pytest.mark.usefixtures("all_verified")
async def test_outputs_are_the_same_with_a_draft_model_that_is_mostly_wrong_when_a_worker_is_lost(
    plain: Plain, tiny_model_directory: Path, byte_tokenizer_directory: Path, tmp_path: Path
) -> None:
    """It is smaller, for shorter sequences, and has a padded vocabulary."""
    small = tmp_path / "small"
    write_tiny_llama(
        small, byte_tokenizer_directory, seed=1, vocab_size=272, num_hidden_layers=1, max_position_embeddings=64
    )
    draft = {"speculative_config": {"method": "draft_model", "model": str(small)}}
    other = await guesses_after_a_loss(plain.without_beams, tiny_model_directory, **draft)
    assert other.verified.num_tokens > 200
    assert other.right.num_tokens < other.verified.num_tokens / 2


LIES: dict[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "it wants more than it may have": (lambda _: 2**32 - 1, lambda room: room),
    "it is always wrong": (lambda _: 3, lambda _: 0),
    "it changes its mind in every step": (lambda step: step % 4, lambda room: room // 2),
    "it wants room that it seldom uses": (lambda _: 3, lambda room: room * (room == 1)),
}


@pytest.mark.parametrize(("wanted", "right"), LIES.values(), ids=LIES)
async def test_a_worker_whose_guesses_are_lies_costs_time_alone(
    wanted: Callable[[int], int], right: Callable[[int], int], byte_tokenizer_directory: Path
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.num_speculative_tokens = 3
    worker.wanted, worker.right = wanted, right
    async with serving(worker) as address, scheduler(address) as one, Client(one.target) as client:
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        completions = await asyncio.gather(*(collect(client, "a" * number, sampling) for number in range(1, 6)))
        (state,) = one.engine.workers.all
    assert [completion.outputs[0].token_ids for completion in completions] == [[TOKEN] * 30] * 5
    assert state.num_losses == 0


async def answers_of(worker: FakeWorkerService) -> tuple[list[tuple[object, ...]], int]:
    """Of requests that end in all ways, and how many guesses were right."""
    ways: list[dict[str, Any]] = [
        *({"max_tokens": number} for number in range(1, 14)),
        *({"max_tokens": 20, "stop_token_ids": [TOKEN], "min_tokens": number} for number in range(8)),
        *({"max_tokens": 20, "stop": ["g" * number]} for number in range(1, 8)),
    ]
    async with serving(worker) as address, scheduler(address) as one, Client(one.target) as client:
        completions = await asyncio.gather(
            *(collect(client, [5], SamplingParams(**{"ignore_eos": True} | way)) for way in ways)
        )
        (state,) = one.engine.workers.all
        found = [
            (output.token_ids, output.text, output.finish_reason, output.stop_reason)
            for completion in completions
            for output in completion.outputs
        ]
        return found, state.drafts.right.num_tokens


async def test_outputs_that_end_within_guesses_end_where_they_would_without(byte_tokenizer_directory: Path) -> None:
    plain, guessing = (FakeWorkerService(byte_tokenizer_directory) for _ in range(2))
    guessing.info.num_speculative_tokens = 3
    guessing.wanted = lambda _: 3
    expected, _ = await answers_of(plain)
    found, num_right = await answers_of(guessing)
    assert found == expected
    assert num_right > 50


def worker_info(**changes: Any) -> WorkerInfo:
    sizes = {"block_size": 8, "num_device_blocks": 64, "max_num_batched_tokens": 256, "max_num_seqs": 64}
    return decode_worker_info(worker_pb.GetWorkerInfoResponse(**(sizes | {"max_model_len": 4096} | changes)))


@pytest.mark.parametrize("num_speculative_tokens", [0, 8, 64])
@pytest.mark.parametrize("sliding_window", [0, 128])
def test_the_context_that_is_promised_is_what_the_core_has_room_for(
    num_speculative_tokens: int, sliding_window: int
) -> None:
    settings = SchedulerSettings(model="fake")
    for num_device_blocks in range(40, 70):
        info = worker_info(
            num_speculative_tokens=num_speculative_tokens,
            sliding_window=sliding_window,
            num_device_blocks=num_device_blocks,
        )
        promised = model_limits(settings, info).context_length
        assert promised <= scheduler_config(settings, info).max_sequence_tokens


def test_outputs_have_room_for_guesses_behind_each_of_them(byte_model: ServedModel) -> None:
    """What the front end lets in, the core does not refuse."""
    settings, info = SchedulerSettings(model="fake"), worker_info(num_speculative_tokens=8, max_model_len=512)
    limits = model_limits(settings, info)
    model = replace(byte_model, **{name: getattr(limits, name) for name in ("pool_tokens", "num_lookahead_slots")})
    model = replace(model, context_length=limits.context_length, block_size=limits.block_size, max_num_seqs=64)
    for n in range(2, 12):
        most = _max_tokens(inference_pb.SamplingParams(n=n), 8, model, fits=False)
        one = Scheduler(scheduler_config(settings, info), WaitingQueue(), "worker")
        one.add_request(SequenceGroup("a", [5] * 8, core.SamplingParams(n=n, max_tokens=most)))
        assert not one.schedule().ignored


def test_a_worker_that_guesses_further_than_requests_were_promised_room_for_is_refused() -> None:
    settings = SchedulerSettings(model="fake")
    limits = model_limits(settings, worker_info())
    with pytest.raises(ValueError, match="the worker makes 8 drafts, but requests were promised room for 0"):
        check_limits(limits, (), settings, worker_info(num_speculative_tokens=8))


async def test_a_worker_without_room_for_its_own_guesses_decides_nothing(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory, num_device_blocks=4)
    worker.info.num_speculative_tokens = 64
    async with serving(worker) as address, scheduler(address) as one:
        await until(lambda: "it cannot be scheduled: num_lookahead_slots" in one.engine.workers.all[0].last_error)
        assert not one.engine.fleet.agreement._limits.done()
