"""Most steps repeat the plan of the one before, and most answers are a token for each sequence, and nothing else.

Both have a fast path. With or without it, whatever happens, the same is planned, and sequences gain the same.
"""

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
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.core.planning.answers import Answers
from scheduler_service.core.planning.running import SteadyPlan

NUM_TOKENS = 25


def random_group(rng: Random, number: int) -> SequenceGroup:
    """Some stop at tokens of their own, some want log-probabilities or have a form, and some go on where another
    scheduler stopped."""
    request = random_request(rng, number)
    sampling = replace(
        request.sampling,
        stop_token_ids=frozenset(rng.choice([(), (), (3, 4), range(5, 12)])),
        logprobs=rng.choice([None] * 7 + [0, 2]),
        prompt_logprobs=None if request.sampling.beam_width else rng.choice([None] * 7 + [1]),
        form="" if request.sampling.beam_width else rng.choice(["", "", "", "", "of some kind"]),
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
        adapter_id=request.adapter_id,
        output_token_ids=outputs,
    )


def answer(output: SchedulerOutput, failing: int, num_lookahead_slots: int) -> ModelOutput:
    """A function of the step and of what is known of each sequence when the answer comes.

    `failing` says which sequences get no token. Some guesses are right, and some steps want others; some outputs in a
    form are late.
    """
    answer, failed, num_tokens = ModelOutput(output.step_id, []), set[int](), list[int]()
    for sequence, num_computed, samples in output.scheduled:
        known, sampling = sequence.token_ids, sequence.sampling
        if sampling.prompt_logprobs is not None:
            first = sequence.num_stored_tokens + 1
            positions = known[first : min(first + num_computed, sequence.num_prompt_tokens)]
            answer.prompt_logprobs |= (
                {sequence.id: [TokenLogprobs([t], [0.0], 1) for t in positions]} if positions else {}
            )
        if not samples:
            continue
        prefix, room = prefix_of(known), output.num_draft_tokens.get(sequence, 0)
        if prefix % 80 == failing:
            failed.add(sequence.id)
        is_late = bool(sampling.form) and (prefix + output.step_id) % 7 == 0
        num_tokens.append(0 if is_late else 1 if sequence.id in failed else 1 + prefix % (room + 1))
        for _ in range(num_tokens[-1]):
            prefix = prefix_of(known)
            known.append(sample(prefix, sequence.index) % NUM_TOKENS)
            answer.token_ids.append(known[-1])
            if (width := sampling.num_logprobs) is not None:
                ranked = candidates(prefix)[:width]
                entry = TokenLogprobs([known[-1], *(t for t, _ in ranked)], [0.0, *(p for _, p in ranked)], 1)
                answer.logprobs.setdefault(sequence.id, []).append(entry)
        answer.num_draft_tokens.append(room)
        answer.num_draft_tokens_wanted.append(prefix % (num_lookahead_slots + 1))
    if num_tokens.count(1) < len(num_tokens):
        answer.num_tokens = num_tokens
    if not num_lookahead_slots or output.step_id % 4:
        answer.num_draft_tokens_wanted = []
    if not output.num_draft_tokens:
        answer.num_draft_tokens = []
    answer.failed_sequence_ids = frozenset(failed)
    return answer


def history(seed: int, takes_part: list[bool]) -> list[Any]:
    """Each step as it was planned, what sequences gained of each answer, and what became of every one by then."""
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
        told.append(plan(output))
        if not output.is_empty:
            in_flight.append(output)
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            first = in_flight.popleft()
            gained = scheduler.update_from_output(first, answer(first, failing, config.num_lookahead_slots), now + 0.5)
            told.append([(item.sequence.group.request_id, item.sequence.index, *item[1:]) for item in gained])
            told.append([[state(sequence) for sequence in group.sequences] for group in groups])
        scheduler.blocks.check()
    assert scheduler.blocks.device.num_free == config.num_device_blocks
    return told


def plan(output: SchedulerOutput) -> list[Any]:
    return [
        [(s.group.request_id, s.index, s.id, num_tokens, samples) for s, num_tokens, samples in output.scheduled],
        [(s.id, *known) for s, *known in output.new_sequences],
        [(parent, child.id, *known) for parent, child, *known in output.forks],
        output.block_table_updates,
        (output.blocks_to_swap_out, output.blocks_to_swap_in, output.blocks_to_copy),
        {s.id: room for s, room in output.num_draft_tokens.items()},
        (output.step_id, output.num_samples, output.num_tokens, output.is_plain),
        (output.finished, output.preempted, [group.request_id for group in output.ignored]),
        output.lacking_adapters,
    ]


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


@pytest.mark.parametrize(
    ("room", "fast", "decision"),
    [(SteadyPlan, "repeat", "repeat"), (Answers, "_take_in_decodes", "_takes_plainly")],
    ids=["a plan that is repeated", "a plain answer"],
)
def test_the_fast_path_does_what_the_full_one_does(
    room: type, fast: str, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, num_taken = getattr(room, fast), 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_taken
        num_taken += bool(found := taken(*arguments))
        return found

    @settings(max_examples=100)
    @given(st.integers(0, 2**32), st.lists(st.booleans(), min_size=12, max_size=12))
    @example(116, [i in (2, 3, 4, 5, 8, 9) for i in range(12)])  # some are swapped out while a plain step is in flight
    @example(159, [True] * 12)  # one that is swapped out has room again before a plan is repeated
    @example(219, [True] * 12)  # one is preempted, and runs again before the answer to a plain step
    def check(seed: int, takes_part: list[bool]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(room, fast, counted)
            told = history(seed, takes_part)
        with monkeypatch.context() as patch:
            patch.setattr(room, decision, lambda *_: False)
            assert history(seed, takes_part) == told

    check()
    assert num_taken > 200


def test_a_beam_that_came_without_log_probabilities_takes_no_token_plainly() -> None:
    config = SchedulerConfig(
        block_size=4, num_device_blocks=20, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=20
    )
    scheduler = Scheduler(config, WaitingQueue())
    scheduler.add_request(SequenceGroup("a", [5], SamplingParams(max_tokens=3, beam_width=2)))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="no log-probabilities for sequence 1, which is a beam"):
        scheduler.update_from_output(output, ModelOutput(output.step_id, [7]))
