"""Most answers are plain: a token for each sequence, and nothing else. They are taken in by a path of their own."""

from collections import deque
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
from fake_worker import candidates, prefix_of, sample
from hypothesis import example, given, settings
from hypothesis import strategies as st
from workloads import random_config, random_request

from scheduler_service.core import (
    FairQueue,
    ModelOutput,
    PriorityQueue,
    Scheduler,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.core.planning.answers import Answers

NUM_TOKENS = 25


def random_group(rng: Random, number: int) -> SequenceGroup:
    """Some stop at tokens of their own, some want log-probabilities, and some go on where another scheduler stopped."""
    request = random_request(rng, number)
    sampling = replace(
        request.sampling,
        stop_token_ids=frozenset(rng.choice([(), (), (3, 4), range(5, 12)])),
        logprobs=rng.choice([None] * 7 + [0, 2]),
    )
    outputs: tuple[list[int], ...] = ()
    if not sampling.beam_width and sampling.max_tokens > 1 and not rng.randrange(4):
        outputs = tuple([20] * rng.randrange(sampling.max_tokens) for _ in range(sampling.n))
    return SequenceGroup(
        request.name,
        request.prompt,
        sampling,
        request.root,
        priority=request.priority,
        tenant=request.tenant,
        lora_name=request.lora_name,
        output_token_ids=outputs,
    )


def answer(output: SchedulerOutput, failing: int) -> ModelOutput:
    """A function of what is known of each sequence when the answer comes; `failing` says which ones get no token."""
    answer, failed = ModelOutput(output.step_id, []), set[int]()
    for sequence, _, samples in output.scheduled:
        if not samples:
            continue
        prefix = prefix_of(sequence.token_ids)
        answer.token_ids.append(sample(prefix, sequence.index) % NUM_TOKENS)
        if (width := sequence.sampling.num_logprobs) is not None:
            ranked = candidates(prefix)[:width]
            answer.logprobs[sequence.id] = [
                TokenLogprobs([answer.token_ids[-1], *(t for t, _ in ranked)], [0.0, *(p for _, p in ranked)], 1)
            ]
        if prefix % 80 == failing:
            failed.add(sequence.id)
    answer.failed_sequence_ids = frozenset(failed)
    return answer


def history(seed: int, takes_part: list[bool]) -> list[Any]:
    """What sequences gained of each answer, and what became of every one by then."""
    rng = Random(seed)
    config = random_config(rng, (5, 8, 12, 20, 60))
    waiting = rng.choice([WaitingQueue, WaitingQueue, PriorityQueue, FairQueue])()
    scheduler, worker_lost = Scheduler(config, waiting), rng.choice([None, None, 9, 20])
    max_in_flight, failing = rng.randint(1, 4), rng.choice([-1, -1, 7])
    groups = [random_group(Random(f"{seed} {i}"), i) for i, takes in enumerate(takes_part) if takes]
    arrivals = [rng.randrange(16) for _ in groups]
    ends = [rng.choice([None, None, None, rng.randrange(arrives, 30)]) for arrives in arrivals]
    in_flight: deque[SchedulerOutput] = deque()
    told: list[Any] = []
    for now in count():
        assert now < 3000, "the run does not end"
        for group, arrives, end in zip(groups, arrivals, ends, strict=True):
            if arrives == now:
                scheduler.add_request(group)
            if end == now and group.beams is None and now % 2:
                scheduler.finish_sequence(group.sequences[-1], SequenceStatus.FINISHED_STOPPED)
            elif end == now:
                scheduler.finish_requests([group.request_id], SequenceStatus.FINISHED_ABORTED)
        if now == worker_lost:
            scheduler.release_all(now)
            in_flight.clear()
            scheduler = Scheduler(config, waiting, now=now)
        if now > 30 and not scheduler.has_work and not in_flight:
            break
        output = scheduler.schedule(now)
        if not output.is_empty:
            in_flight.append(output)
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            first = in_flight.popleft()
            gained = scheduler.update_from_output(first, answer(first, failing), now + 0.5)
            told.append([(item.sequence.group.request_id, item.sequence.index, *item[1:]) for item in gained])
            told.append([[state(sequence) for sequence in group.sequences] for group in groups])
        scheduler.blocks.check()
    assert scheduler.blocks.device.num_free == config.num_device_blocks
    return told


def state(sequence: Sequence) -> tuple[Any, ...]:
    suspicion = sequence.group.suspicion
    return (
        sequence.token_ids,
        sequence.status,
        sequence.stop_token_id,
        sequence.num_stored_tokens,
        sequence.num_published_blocks,
        suspicion and suspicion.num_losses,  # none after tokens enough
    )


def test_a_plain_answer_is_taken_in_as_any_other_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    is_plain, num_plain = Answers._is_plain, 0

    def counted(self: Answers, output: SchedulerOutput, answer: ModelOutput) -> bool:
        nonlocal num_plain
        num_plain += (plain := is_plain(self, output, answer))
        return plain

    @settings(max_examples=100)
    @given(st.integers(0, 2**32), st.lists(st.booleans(), min_size=12, max_size=12))
    @example(116, [i in (2, 3, 4, 5, 8, 9) for i in range(12)])  # some are swapped out while a plain step is in flight
    def check(seed: int, takes_part: list[bool]) -> None:
        monkeypatch.setattr(Answers, "_is_plain", counted)
        told = history(seed, takes_part)
        monkeypatch.setattr(Answers, "_is_plain", lambda *_: False)
        assert history(seed, takes_part) == told

    check()
    assert num_plain > 200
