"""Small schedulers and groups, and ways to run them."""

import hashlib
import itertools
from array import array
from collections.abc import Iterable

import pytest
from fake_worker import FakeWorker

from scheduler_service.core import (
    EncoderInput,
    ImagePart,
    ModelOutput,
    PromptItem,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    WaitingQueue,
)
from scheduler_service.core.groups.prompt_item import PLACEHOLDER
from scheduler_service.core.groups.suspicion import Suspicion
from scheduler_service.core.placement.background import Background
from scheduler_service.core.suspects import rule

_numbers = itertools.count()


def make_scheduler(
    waiting: WaitingQueue | None = None, worker: str | None = None, *, now: float = 0.0, **sizes: object
) -> Scheduler:
    """A scheduler, by default of a worker with a new name."""
    defaults: dict[str, object] = {
        "block_size": 4,
        "num_device_blocks": 16,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "watermark": 0.0,
    }
    config = SchedulerConfig(**(defaults | sizes))  # type: ignore[arg-type]
    worker = f"worker {next(_numbers)}" if worker is None else worker
    return Scheduler(config, WaitingQueue() if waiting is None else waiting, worker, now)


def make_group(
    name: str,
    num_tokens: int,
    *,
    root: bytes = b"",
    priority: int = 0,
    tenant: str = "",
    adapter_id: str = "",
    encoder: Iterable[int] = (),
    items: tuple[PromptItem, ...] = (),
    **sampling: object,
) -> SequenceGroup:
    """The prompt is 0, 1, 2, …, so that any two prompts begin alike. `encoder` are the encoder's tokens. Placeholders
    stand for `items`."""
    prompt = list(range(num_tokens))
    for item in items:
        prompt[item.start : item.stop] = [PLACEHOLDER] * item.num_embeddings
    params = SamplingParams(**({"max_tokens": 4} | sampling))  # type: ignore[arg-type]
    tokens = array("I", encoder)
    return SequenceGroup(
        name,
        prompt,
        params,
        root,
        priority=priority,
        tenant=tenant,
        adapter_id=adapter_id,
        encoder_input=EncoderInput(num_tokens=len(tokens), token_ids=tokens) if tokens else None,
        items=items,
    )


def make_item(content: str, start: int, num_embeddings: int, num_bytes: int = 100) -> PromptItem:
    return PromptItem(hashlib.sha256(content.encode()).digest(), start, num_embeddings, num_bytes, bytes(num_bytes))


def make_image(content: str, start: int, num_embeddings: int, part: int = 0) -> PromptItem:
    return make_item(content, start, num_embeddings)._replace(image=ImagePart(64, 48, part))


def suspect(group: SequenceGroup, num_losses: int = 2, *workers: str) -> SequenceGroup:
    """The group after losses of these workers, in company."""
    group.suspicion = Suspicion()
    for number in range(num_losses):
        worker = workers[number % len(workers)] if workers else "lost"
        rule.lose(group.suspicion, Background(), worker=worker, seconds=0.0, now=0.0, alone=False)
    return group


def plan(output: SchedulerOutput) -> dict[str, list[int]]:
    """Computed tokens of each request's sequences in a step."""
    chunks: dict[str, list[int]] = {}
    for sequence, num_tokens, _ in output.scheduled:
        chunks.setdefault(sequence.group.request_id, []).append(num_tokens)
    return chunks


def step(scheduler: Scheduler, worker: FakeWorker) -> SchedulerOutput:
    output = scheduler.schedule()
    if not output.is_empty:
        scheduler.update_from_output(output, worker.execute(output))
    scheduler.blocks.check()
    scheduler.encoder_cache.check()
    assert scheduler.num_running_seqs == sum(group.num_seqs for group in scheduler.running)
    return output


def run(scheduler: Scheduler, worker: FakeWorker, most_steps: int = 10_000) -> None:
    for _ in range(most_steps):
        if not scheduler.has_work:
            return
        step(scheduler, worker)
    pytest.fail("the run does not end")


def output_of(group: SequenceGroup, index: int = 0) -> list[int]:
    sequence = group.sequences[index]
    return sequence.token_ids[sequence.num_prompt_tokens :]


def run_ahead(
    scheduler: Scheduler, worker: FakeWorker, num_ahead: int, most_steps: int = 10_000
) -> list[SchedulerOutput]:
    """Run to the end with `num_ahead` steps in flight; returns all steps."""
    steps: list[SchedulerOutput] = []
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    while scheduler.has_work or in_flight:
        assert len(steps) < most_steps, "the run does not end"
        output = scheduler.schedule()
        if not output.is_empty:
            steps.append(output)
            in_flight.append((output, worker.execute(output)))
        if output.is_empty or len(in_flight) > num_ahead:
            scheduler.update_from_output(*in_flight.pop(0))
        scheduler.blocks.check()
        scheduler.encoder_cache.check()
        assert scheduler.num_running_seqs == sum(group.num_seqs for group in scheduler.running)
    return steps
