from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from random import Random

import pytest
from fake_worker import FakeWorker, reference_beams, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core import (
    FairQueue,
    ModelOutput,
    PhaseRule,
    PreemptionMode,
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


def make_scheduler(waiting: WaitingQueue | None = None, **sizes: object) -> Scheduler:
    defaults: dict[str, object] = {
        "block_size": 4,
        "num_device_blocks": 16,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "watermark": 0.0,
    }
    return Scheduler(SchedulerConfig(**(defaults | sizes)), WaitingQueue() if waiting is None else waiting)  # type: ignore[arg-type]


def make_group(
    name: str,
    num_tokens: int,
    *,
    root: bytes = b"",
    priority: int = 0,
    tenant: str = "",
    lora_name: str = "",
    **sampling: object,
) -> SequenceGroup:
    """Its prompt is 0, 1, 2, …, so that any two prompts begin alike."""
    params = SamplingParams(**({"max_tokens": 4} | sampling))  # type: ignore[arg-type]
    return SequenceGroup(name, range(num_tokens), params, root, priority=priority, tenant=tenant, lora_name=lora_name)


def plan(output: SchedulerOutput) -> dict[str, list[int]]:
    """How many tokens each request's sequences compute in a step."""
    chunks: dict[str, list[int]] = {}
    for sequence, num_tokens, _ in output.scheduled:
        chunks.setdefault(sequence.group.request_id, []).append(num_tokens)
    return chunks


def step(scheduler: Scheduler, worker: FakeWorker) -> SchedulerOutput:
    output = scheduler.schedule()
    if not output.is_empty:
        scheduler.update_from_output(output, worker.execute(output))
    scheduler.blocks.check()
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


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_after_the_last() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_group("a", 20))
    worker = FakeWorker(scheduler.config)
    outputs = [step(scheduler, worker) for _ in range(4)]
    assert [plan(output) for output in outputs] == [{"a": [8]}, {"a": [8]}, {"a": [4]}, {"a": [1]}]
    assert [output.scheduled[0].samples for output in outputs] == [False, False, True, True]


def test_decodes_and_prefill_chunks_share_a_step_and_decodes_go_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("long", 12))
    step(scheduler, worker)
    scheduler.add_request(make_group("short", 2))
    assert plan(step(scheduler, worker)) == {"long": [4], "short": [2]}
    scheduler.add_request(make_group("longer", 30))
    assert plan(step(scheduler, worker)) == {"long": [1], "short": [1], "longer": [6]}


def test_separate_phases_never_mix_prompts_and_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, phase_rule=PhaseRule.SEPARATE)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 6, root=b"1"))
    assert plan(step(scheduler, worker)) == {"first": [6]}
    scheduler.add_request(make_group("second", 12, root=b"2"))
    scheduler.add_request(make_group("third", 3, root=b"3"))
    assert plan(step(scheduler, worker)) == {"second": [8]}
    assert plan(step(scheduler, worker)) == {"second": [4], "third": [3]}
    assert plan(step(scheduler, worker)) == {"first": [1], "second": [1], "third": [1]}
    run(scheduler, worker)


def test_a_delay_factor_lets_prompts_batch_up() -> None:
    """The prompt step took 1 s; with a factor of 3 the next prompt waits until the head has waited 3 s."""
    scheduler = make_scheduler(phase_rule=PhaseRule.SEPARATE, delay_factor=3.0)
    worker = FakeWorker(scheduler.config)

    def step_at(now: float) -> list[str]:
        output = scheduler.schedule(now)
        scheduler.update_from_output(output, worker.execute(output), now + 1)
        return list(plan(output))

    for name, arrived_at in (("first", 0.0), ("second", 1.0), ("third", 3.0)):
        group = make_group(name, 4, root=name.encode(), max_tokens=9)
        group.arrived_at = arrived_at
        if name == "first":
            scheduler.add_request(group)
            assert step_at(0.0) == ["first"]
        else:
            scheduler.add_request(group)
    assert [step_at(now) for now in (1.0, 2.0, 3.0)] == [["first"]] * 3
    assert step_at(4.0) == ["second", "third"]
    assert step_at(5.0) == ["first", "second", "third"]


def test_a_step_that_does_nothing_but_swap_in_is_sent() -> None:
    """With three steps in flight the last token of a group that comes back may have been computed before it left."""
    assert not SchedulerOutput(1, blocks_to_swap_in=[(0, 0)]).is_empty
    assert SchedulerOutput(1).is_empty


def test_requests_start_in_the_order_of_arrival_and_the_head_is_never_overtaken() -> None:
    scheduler = make_scheduler(num_device_blocks=4)
    worker = FakeWorker(scheduler.config)
    for name, num_tokens in (("first", 12), ("second", 12), ("third", 2)):
        scheduler.add_request(make_group(name, num_tokens, max_tokens=2))
    assert list(plan(step(scheduler, worker))) == ["first"]
    assert [group.request_id for group in scheduler.waiting] == ["second", "third"]


def test_sequences_are_counted_not_groups() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("three", 2, n=3))
    scheduler.add_request(make_group("two", 2, n=2))
    step(scheduler, worker)
    assert scheduler.get_request_counts() == (1, 1, 0)
    run(scheduler, worker)


def test_when_blocks_run_out_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_device_blocks=4)
    worker = FakeWorker(scheduler.config)
    older, younger = make_group("older", 8, max_tokens=5), make_group("younger", 8, max_tokens=5)
    for group in (older, younger, make_group("next", 4)):
        scheduler.add_request(group)
    step(scheduler, worker)
    younger_id = younger.sequences[0].id
    output = step(scheduler, worker)
    assert list(plan(output)) == ["older"]
    assert output.preempted == [younger_id]
    assert scheduler.waiting.head is younger
    assert younger.sequences[0].num_computed_tokens == 0
    run(scheduler, worker)
    for group in (older, younger):
        assert output_of(group) == reference_output(group, 0, scheduler.config.max_sequence_tokens)


def test_a_prompt_that_was_computed_is_found_while_and_after_somebody_holds_it() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    first, second, third = (make_group(name, 11) for name in ("first", "second", "third"))
    scheduler.add_request(first)
    step(scheduler, worker)
    scheduler.add_request(second)
    assert plan(step(scheduler, worker)) == {"first": [1], "second": [3]}
    run(scheduler, worker)
    assert scheduler.blocks.device.num_free == 16
    scheduler.add_request(third)
    assert plan(step(scheduler, worker)) == {"third": [3]}
    assert [group.num_cached_tokens for group in (first, second, third)] == [0, 8, 8]
    run(scheduler, worker)
    assert output_of(first) == output_of(second) == output_of(third) == reference_output(first, 0, 64)


def test_a_block_is_findable_only_after_it_has_been_computed() -> None:
    scheduler = make_scheduler()
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 11))
    assert plan(scheduler.schedule()) == {"first": [11], "second": [11]}


def test_output_is_found_too_and_the_last_token_is_always_computed() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    first = make_group("first", 6, max_tokens=7)
    scheduler.add_request(first)
    run(scheduler, worker)
    continued = SequenceGroup("continued", first.sequences[0].token_ids[:12], SamplingParams(max_tokens=2))
    scheduler.add_request(continued)
    assert plan(step(scheduler, worker)) == {"continued": [4]}  # of three full blocks two are used


@pytest.mark.parametrize("other", [{"root": b"another salt"}, {"lora_name": "a"}, {"prompt_logprobs": 1}])
def test_prompts_of_another_salt_or_adapter_or_whose_log_probabilities_are_wanted_are_computed_whole(
    other: dict[str, object],
) -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 11))
    run(scheduler, worker)
    scheduler.add_request(make_group("other", 11, **other))  # type: ignore[arg-type]
    assert plan(step(scheduler, worker)) == {"other": [11]}


def test_what_a_sequence_with_unsound_logits_stored_is_never_found() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_group("sick", 11))
    first = scheduler.schedule()
    scheduler.update_from_output(first, ModelOutput(1, []))
    second = scheduler.schedule()
    failed = frozenset({second.scheduled[0].sequence.id})
    scheduler.update_from_output(second, ModelOutput(2, [0], failed_sequence_ids=failed))
    scheduler.add_request(make_group("well", 11))
    assert plan(scheduler.schedule()) == {"well": [8]}


def test_a_preempted_group_finds_what_is_left_of_its_own_blocks() -> None:
    scheduler = make_scheduler(num_device_blocks=8, block_size=2)
    worker = FakeWorker(scheduler.config)
    for name, root in (("older", b"a"), ("younger", b"b")):
        scheduler.add_request(make_group(name, 5, root=root, max_tokens=9))
    while not sum(scheduler.num_preemptions.values()):
        step(scheduler, worker)
    younger = scheduler.waiting.head
    while younger not in scheduler.running:
        output = step(scheduler, worker)
    assert 0 < plan(output)["younger"][0] < len(younger.sequences[0].token_ids)
    run(scheduler, worker)
    assert output_of(younger) == reference_output(younger, 0, 16)


def test_a_swapped_group_comes_back_with_its_blocks_and_computes_nothing_anew() -> None:
    scheduler = make_scheduler(num_device_blocks=7, num_host_blocks=7, preemption_mode=PreemptionMode.SWAP)
    worker = FakeWorker(scheduler.config)
    groups = [make_group(name, 7, n=2, max_tokens=9) for name in ("older", "younger")]
    for group in groups:
        scheduler.add_request(group)
    computed: Counter[str] = Counter()
    while scheduler.has_work:
        for name, chunks in plan(step(scheduler, worker)).items():
            computed[name] += sum(chunks)
    assert scheduler.num_preemptions[PreemptionMode.SWAP] > 0
    assert scheduler.num_preemptions[PreemptionMode.RECOMPUTE] == 0
    # The prompt once, the last prompt token again by the follower, and every output token but the last of each.
    assert computed == {"older": 7 + 1 + 2 * 8, "younger": 7 + 1 + 2 * 8}
    for group in groups:
        for index in range(2):
            assert output_of(group, index) == reference_output(group, index, 24)


def swapping_scheduler(**sizes: object) -> tuple[Scheduler, FakeWorker, SequenceGroup]:
    """Two groups of two of which the younger has just been swapped out."""
    defaults: dict[str, object] = {"num_device_blocks": 7, "num_host_blocks": 7, "preemption_mode": PreemptionMode.SWAP}
    scheduler = make_scheduler(**(defaults | sizes))
    worker = FakeWorker(scheduler.config)
    for name in ("older", "younger"):
        scheduler.add_request(make_group(name, 7, n=2, max_tokens=9))
    while not sum(scheduler.num_preemptions.values()):
        step(scheduler, worker)
    return scheduler, worker, next(iter(scheduler.swapped or scheduler.waiting))


def run_ahead(
    scheduler: Scheduler, worker: FakeWorker, num_ahead: int, most_steps: int = 10_000
) -> list[SchedulerOutput]:
    """Run to the end with so many steps planned before the oldest is answered; returns all steps."""
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
    return steps


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_planning_ahead_gives_the_tokens_of_the_synchronous_loop(num_ahead: int, mode: PreemptionMode) -> None:
    scheduler = make_scheduler(num_device_blocks=12, num_host_blocks=12, preemption_mode=mode)
    groups = [make_group(str(i), 3 * i + 1, root=bytes(i), n=1 + i % 3, max_tokens=9) for i in range(5)]
    for group in groups:
        scheduler.add_request(group)
    run_ahead(scheduler, FakeWorker(scheduler.config), num_ahead)
    assert sum(scheduler.num_preemptions.values()) > 0
    for group in groups:
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 64)


def test_a_sequence_that_stopped_unforeseen_wastes_one_slot_a_step_ahead_and_nothing_else() -> None:
    scheduler = make_scheduler()
    group = make_group("a", 3, max_tokens=20)
    expected = reference_output(group, 0, 64)
    stops = make_group("a", 3, max_tokens=20, stop_token_ids=frozenset({expected[3]}))
    scheduler.add_request(stops)
    steps = run_ahead(scheduler, FakeWorker(scheduler.config), 1)
    assert output_of(stops) == expected[:4]
    assert [bool(output.scheduled) for output in steps] == [True] * 5 + [False]  # the last one says that it finished


def test_a_sequence_whose_last_token_is_in_flight_is_not_scheduled_again() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_group("a", 3, max_tokens=5))
    steps = run_ahead(scheduler, FakeWorker(scheduler.config), 3)
    assert [bool(output.scheduled) for output in steps] == [True] * 5 + [False]


def test_a_suspect_has_the_worker_to_itself_also_when_planning_ahead() -> None:
    waiting = WaitingQueue()
    for name in ("suspect", "other"):
        waiting.append(make_group(name, 4))
    waiting.head.num_lost_steps = 2
    scheduler = make_scheduler(waiting)
    alone = scheduler.schedule()
    assert list(plan(alone)) == ["suspect"]
    assert scheduler.schedule().is_empty
    scheduler.update_from_output(alone, ModelOutput(1, [3]))
    assert list(plan(scheduler.schedule())) == ["suspect", "other"]


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_beam_search_finds_what_an_exhaustive_one_finds_through_preemptions(
    early_stopping: bool, num_ahead: int, mode: PreemptionMode
) -> None:
    scheduler = make_scheduler(num_device_blocks=14, num_host_blocks=14, preemption_mode=mode)
    groups = [
        make_group(
            str(i),
            3 * i + 1,
            root=bytes(i),
            beam_width=2 + i % 3,
            max_tokens=9,
            min_tokens=i % 3,
            eos_token_ids=frozenset(range(5 * (i % 2))),
            length_penalty=[0.0, 1.0, -0.5, 2.0][i % 4],
            early_stopping=early_stopping,
        )
        for i in range(8)
    ]
    for group in groups:
        scheduler.add_request(group)
    run_ahead(scheduler, FakeWorker(scheduler.config), num_ahead)
    assert sum(scheduler.num_preemptions.values()) > 0
    for group in groups:
        assert group.beams is not None
        assert [hypothesis.token_ids for hypothesis in group.beams.hypotheses] == reference_beams(group, 56)
    assert scheduler.blocks.device.num_free == scheduler.blocks.host.num_free == 14


def test_beams_share_their_blocks_and_are_sent_as_forks() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 9, beam_width=4, max_tokens=3)
    scheduler.add_request(group)
    step(scheduler, worker)
    assert len(group.live) == 4
    assert scheduler.blocks.device.num_free == 16 - 3
    output = step(scheduler, worker)
    assert len(output.forks) == 4
    assert not output.new_sequences
    assert [fork.num_tokens for fork in output.forks] == [9] * 4
    assert len(output.blocks_to_copy) == 3
    assert len(output.finished) == 1


def test_all_the_beams_that_a_search_will_have_count_in_the_budget_from_the_start() -> None:
    scheduler = make_scheduler(max_num_seqs=6)
    scheduler.add_request(make_group("a", 3, beam_width=4))
    scheduler.add_request(make_group("b", 3, n=3))
    assert list(plan(scheduler.schedule())) == ["a"]


def test_an_answer_without_the_beams_log_probabilities_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_group("a", 3, beam_width=2))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="no log-probabilities for sequence 1"):
        scheduler.update_from_output(output, ModelOutput(1, [5]))


def test_blocks_behind_a_sliding_window_are_used_again() -> None:
    """32 tokens in a pool of 3 blocks of 4: a window of 5 and chunks of 4 touch at most 3 blocks at a time."""
    scheduler = make_scheduler(
        num_device_blocks=3, max_num_batched_tokens=4, max_num_seqs=1, sliding_window=5, max_model_len=100
    )
    assert scheduler.config.max_sequence_tokens == 100
    group = make_group("a", 20, max_tokens=12)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert output_of(group) == reference_output(group, 0, 100)
    assert sum(scheduler.num_preemptions.values()) == 0


@settings(deadline=None, max_examples=100)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(8, 20), st.sampled_from(PreemptionMode))
def test_guesses_are_verified_and_change_nothing_but_the_number_of_steps(
    random: Random, num_lookahead_slots: int, num_blocks: int, mode: PreemptionMode
) -> None:
    scheduler = make_scheduler(
        num_lookahead_slots=num_lookahead_slots,
        num_device_blocks=num_blocks,
        num_host_blocks=8,
        preemption_mode=mode,
        max_num_batched_tokens=12,
    )
    most = scheduler.config.max_sequence_tokens
    groups = [
        make_group(str(i), random.randint(1, 9), root=bytes(i), n=1 + i % 2, max_tokens=random.randint(1, 15))
        for i in range(4)
    ]
    groups[2].sequences[0].sampling = replace(groups[2].sampling, stop_token_ids=frozenset(range(20)))
    worker = FakeWorker(scheduler.config)
    for group in groups:
        scheduler.add_request(group)
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    for _ in range(2_000):
        if not scheduler.has_work and not in_flight:
            break
        drafts = {}
        for sequence in (sequence for group in groups for sequence in group.live if sequence.id):
            expected = reference_output(sequence.group, sequence.index, most)[sequence.num_output_tokens :]
            drafts[sequence.id] = [t if random.random() < 0.7 else random.randrange(50) for t in [*expected, 1, 2]]
        scheduler.update_draft_token_ids(drafts)
        output = scheduler.schedule()
        assert all(len(draft) <= num_lookahead_slots for draft in output.draft_tokens.values())
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == 2):
            scheduler.update_from_output(*in_flight.pop(0))
        scheduler.blocks.check()
    assert scheduler.blocks.device.num_free == num_blocks
    for group in groups:
        for sequence in group.sequences:
            expected = reference_output(group, sequence.index, most)
            if sequence.status is SequenceStatus.FINISHED_IGNORED:
                expected = expected[: sequence.num_output_tokens]
            elif sequence.sampling.stop_token_ids:
                ends = [i for i, token in enumerate(expected) if token < 20]
                expected = expected[: ends[0] + 1] if ends else expected
            assert output_of(group, sequence.index) == expected


def test_right_guesses_save_steps() -> None:
    scheduler = make_scheduler(num_lookahead_slots=3)
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 5, max_tokens=9)
    scheduler.add_request(group)
    expected = reference_output(group, 0, 61)
    step(scheduler, worker)
    for num_output_tokens in (1, 5):
        assert output_of(group) == expected[:num_output_tokens]
        scheduler.update_draft_token_ids({1: expected[num_output_tokens:], 99: [1]})
        assert plan(step(scheduler, worker)) == {"a": [4]}
    assert output_of(group) == expected
    assert not scheduler.running


def test_blocks_behind_a_sliding_window_are_free_before_anybody_needs_one() -> None:
    """A window of 2 in blocks of 4: while position 5 is computed nobody attends to the first block any more."""
    scheduler = make_scheduler(sliding_window=2, max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 3, max_tokens=20))
    in_use = []
    for _ in range(7):
        step(scheduler, worker)
        in_use.append(16 - scheduler.blocks.device.num_free)
    # Computed before each step: 0, 3, 4, 5, 6, 7, 8 tokens.
    assert in_use == [1, 1, 2, 1, 1, 1, 2]


def test_lookahead_slots_have_blocks_before_they_are_needed() -> None:
    scheduler = make_scheduler(num_lookahead_slots=3)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 5, max_tokens=8))
    for num_tokens in range(5, 12):
        step(scheduler, worker)
        (table,) = scheduler.blocks.tables.values()
        assert len(table) == -(-(num_tokens + 3) // 4)


def test_no_more_adapters_run_together_than_allowed() -> None:
    scheduler = make_scheduler(PriorityQueue(), max_num_seqs=2, max_loras=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 4, priority=1, lora_name="a", max_tokens=9))
    scheduler.add_request(make_group("second", 4, priority=1, lora_name="b", max_tokens=9))
    scheduler.add_request(make_group("base", 4, priority=1, max_tokens=9))
    assert list(plan(step(scheduler, worker))) == ["first"]  # and nobody overtakes the second, who waits for a slot
    scheduler.add_request(make_group("urgent", 4, priority=0, lora_name="a", max_tokens=2))
    assert set(plan(step(scheduler, worker))) == {"first", "urgent"}
    scheduler.finish_requests(["first", "urgent"], SequenceStatus.FINISHED_ABORTED)
    assert list(plan(step(scheduler, worker))) == ["second", "base"]
    run(scheduler, worker)


def test_preemption_gives_back_the_victims_adapter_not_the_other_groups() -> None:
    scheduler = make_scheduler(PriorityQueue(), max_loras=1)
    worker = FakeWorker(scheduler.config)
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 4, priority=2, lora_name="a", max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 4, priority=0, lora_name="b", max_tokens=3))
    assert list(plan(step(scheduler, worker))) == ["urgent"]  # both had to go
    scheduler.add_request(make_group("more", 4, priority=0, lora_name="b", max_tokens=3))
    assert set(plan(step(scheduler, worker))) == {"urgent", "more"}
    run(scheduler, worker)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_groups_that_take_turns_for_the_pool_do_not_preempt_each_other_for_ever(mode: PreemptionMode) -> None:
    """Each alone fits; any two outgrow the pool. Every preemption must be paid for by tokens."""
    scheduler = make_scheduler(num_device_blocks=8, num_host_blocks=32, preemption_mode=mode)
    groups = [make_group(str(i), 10, root=bytes(i), max_tokens=22) for i in range(6)]
    for group in groups:
        scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config), most_steps=6 * 22 + 20)
    assert sum(scheduler.num_preemptions.values()) <= 20


@pytest.mark.parametrize("policy", [WaitingQueue, FairQueue])
def test_a_blocked_head_is_overtaken_by_nobody(policy: Callable[[], WaitingQueue]) -> None:
    scheduler = make_scheduler(policy(), num_device_blocks=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("running", 16, root=b"1", max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("large", 24, root=b"2"))
    for i in range(70):
        scheduler.add_request(make_group(f"small {i}", 2, root=b"3"))
    while "large" not in plan(output := step(scheduler, worker)):
        assert list(plan(output)) == ["running"]
    run(scheduler, worker)


def test_aborting_a_swapped_group_frees_its_host_blocks() -> None:
    scheduler, _, younger = swapping_scheduler()
    assert scheduler.get_request_counts() == (1, 0, 1)
    assert scheduler.blocks.host.num_free < 7
    assert scheduler.finish_requests(["younger"], SequenceStatus.FINISHED_ABORTED) == [younger]
    assert scheduler.blocks.host.num_free == 7
    assert set(scheduler.schedule().finished) == {sequence.id for sequence in younger.sequences}
    assert scheduler.get_request_counts() == (1, 0, 0)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_in_host_memory_a_victim_recomputes_and_nothing_dies(num_host_blocks: int) -> None:
    scheduler, worker, _ = swapping_scheduler(num_host_blocks=num_host_blocks)
    assert scheduler.num_preemptions == {PreemptionMode.SWAP: 0, PreemptionMode.RECOMPUTE: 1}
    run(scheduler, worker)


def test_a_lost_worker_gives_swapped_groups_back_too() -> None:
    scheduler, _, younger = swapping_scheduler()
    scheduler.release_all()
    assert [group.request_id for group in scheduler.waiting] == ["older", "younger"]
    assert {sequence.status for sequence in younger.sequences} == {SequenceStatus.WAITING}
    assert scheduler.blocks.host.num_free == 7


def test_nobody_is_admitted_while_somebody_is_swapped_out() -> None:
    scheduler, worker, younger = swapping_scheduler()
    scheduler.add_request(make_group("newcomer", 1, max_tokens=1))
    while True:
        admitted = "newcomer" in plan(step(scheduler, worker))
        if younger not in scheduler.swapped:
            break
        assert not admitted
    run(scheduler, worker)


def test_a_swapped_group_that_can_never_come_back_is_ended_and_its_host_blocks_are_freed() -> None:
    """Two outputs that share six prompt tokens grow until one more token of each needs more than the pool."""
    scheduler, worker, younger = swapping_scheduler()
    for sequence in younger.live:
        sequence.token_ids += [1] * 20
    run(scheduler, worker)
    assert {sequence.status for sequence in younger.sequences} == {SequenceStatus.FINISHED_IGNORED}
    assert younger.error is not None
    assert scheduler.blocks.host.num_free == 7


@pytest.mark.parametrize(("swap_speed", "mode"), [(10_000_000, PreemptionMode.SWAP), (1_000, PreemptionMode.RECOMPUTE)])
def test_auto_takes_whichever_is_cheaper(swap_speed: int, mode: PreemptionMode) -> None:
    scheduler, _, _ = swapping_scheduler(
        preemption_mode=PreemptionMode.AUTO,
        block_bytes=10_000,
        swap_bytes_per_second=swap_speed,
        prefill_tokens_per_second=1_000,
    )
    assert scheduler.num_preemptions[mode] == 1


def test_victims_tokens_return_to_the_budget() -> None:
    """What a victim had been planned for goes to those who are planned after it, token for token.

    Two groups of two come back from a lost worker with 12 output tokens each, and a single one joins them. In the
    second step the single one is planned first (1 token), then the first group (1 + 12); the second group needs
    blocks, takes the single one's place, and of the budget of 26 tokens finds 13, not 12.
    """
    waiting = WaitingQueue()
    scheduler = make_scheduler(waiting, num_device_blocks=64)
    worker = FakeWorker(scheduler.config)
    groups = [make_group(name, 4, n=2, max_tokens=20) for name in "ab"]
    for group in groups:
        scheduler.add_request(group)
    while min(len(sequence.token_ids) for group in groups for sequence in group.sequences) < 16:
        step(scheduler, worker)
    for sequence in (sequence for group in groups for sequence in group.sequences):
        del sequence.token_ids[16:]
    scheduler.release_all()
    scheduler.add_request(make_group("single", 4))

    scheduler = make_scheduler(waiting, num_device_blocks=17, max_num_batched_tokens=40)
    worker = FakeWorker(scheduler.config)
    assert plan(step(scheduler, worker)) == {"a": [16], "b": [16], "single": [4]}
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=26)
    assert plan(step(scheduler, worker)) == {"a": [1, 12], "b": [1, 12]}
    assert [group.request_id for group in waiting] == ["single"]


def test_n_outputs_share_the_prompts_blocks_until_they_write() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 8, n=3, max_tokens=3)
    scheduler.add_request(group)
    step(scheduler, worker)
    tables = [scheduler.blocks.tables[sequence.id] for sequence in group.sequences]
    assert tables[0][:2] == tables[1] == tables[2]
    output = step(scheduler, worker)
    assert not output.new_sequences
    assert [fork.child.index for fork in output.forks] == [1, 2]
    run(scheduler, worker)
    assert [output_of(group, index) for index in range(3)] == [reference_output(group, index, 64) for index in range(3)]


def test_an_output_that_ends_with_its_first_token_leaves_the_prompt_to_the_others() -> None:
    group = make_group("a", 6, n=2, max_tokens=3)
    first = reference_output(group, 0, 64)[0]
    group = make_group("a", 6, n=2, max_tokens=3, eos_token_ids=frozenset({first}))
    scheduler = make_scheduler()
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert output_of(group, 0) == [first]
    assert output_of(group, 1) == reference_output(group, 1, 64)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_leader_that_ends_before_the_others_could_fork_leaves_the_prompt_to_them(num_ahead: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 20, n=3)
    scheduler.add_request(group)
    step(scheduler, worker)
    scheduler.finish_sequence(group.sequences[0], SequenceStatus.FINISHED_STOPPED)
    run_ahead(scheduler, worker, num_ahead)
    assert output_of(group, 0) == []
    assert [output_of(group, index) for index in (1, 2)] == [reference_output(group, index, 64) for index in (1, 2)]
    assert group.prompt_token_ids == list(range(20))


@pytest.mark.parametrize(
    ("sampling", "status", "num_tokens", "stop"),
    [
        ({"max_tokens": 3}, SequenceStatus.FINISHED_LENGTH_CAPPED, 3, None),
        ({"max_tokens": 99}, SequenceStatus.FINISHED_LENGTH_CAPPED, 60, None),
        ({"max_tokens": 9, "eos_token_ids": frozenset(range(50))}, SequenceStatus.FINISHED_STOPPED, 1, None),
        ({"max_tokens": 9, "stop_token_ids": frozenset(range(50))}, SequenceStatus.FINISHED_STOPPED, 1, "token"),
        (
            {"max_tokens": 9, "min_tokens": 3, "eos_token_ids": frozenset(range(50))},
            SequenceStatus.FINISHED_STOPPED,
            4,
            None,
        ),
    ],
)
def test_sequences_end_for_the_stated_reason(
    sampling: dict[str, object], status: SequenceStatus, num_tokens: int, stop: str | None
) -> None:
    scheduler = make_scheduler()
    group = make_group("a", 4, **sampling)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    sequence = group.sequences[0]
    assert (sequence.status, sequence.num_output_tokens) == (status, num_tokens)
    assert sequence.stop_token_id == (sequence.token_ids[-1] if stop else None)


def test_a_pool_of_one_block_and_no_host_memory_serves_what_fits_in_it_one_after_the_other() -> None:
    scheduler = make_scheduler(num_device_blocks=1, preemption_mode=PreemptionMode.SWAP)
    groups = [make_group("a", 1, max_tokens=9), make_group("b", 3, n=2), make_group("c", 4), make_group("d", 5)]
    for group in groups:
        scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert [len(output_of(group)) for group in groups] == [3, 0, 1, 0]
    ignored = SequenceStatus.FINISHED_IGNORED
    assert [group.sequences[0].status is ignored for group in groups] == [False, True, False, True]
    assert scheduler.blocks.device.num_free == 1


def test_a_prompt_of_exactly_the_pool_runs() -> None:
    scheduler = make_scheduler(num_device_blocks=4, watermark=0.5)
    group = make_group("a", 15)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert group.sequences[0].num_output_tokens == 1


@pytest.mark.parametrize(("num_tokens", "n"), [(99, 1), (4, 9)])
def test_a_group_that_can_never_run_is_ignored_with_a_reason_and_the_next_one_runs(num_tokens: int, n: int) -> None:
    scheduler = make_scheduler()
    group, neighbour = make_group("big", num_tokens, n=n), make_group("small", 4)
    scheduler.add_request(group)
    scheduler.add_request(neighbour)
    output = step(scheduler, FakeWorker(scheduler.config))
    assert output.ignored == [group]
    assert group.error is not None
    assert "16 blocks of 4 tokens and 8 sequences" in group.error
    assert {sequence.status for sequence in group.sequences} == {SequenceStatus.FINISHED_IGNORED}
    assert plan(output) == {"small": [4]}


def test_nobody_makes_room_for_a_group_that_can_never_run() -> None:
    """Its outputs need more than the pool; all places are taken, so that nobody can tell before looking."""
    scheduler = make_scheduler(PriorityQueue(), max_num_seqs=2, num_device_blocks=4)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("running", 4, priority=5, n=2, max_tokens=5))
    step(scheduler, worker)
    impossible = make_group("impossible", 17, priority=0)
    scheduler.add_request(impossible)
    output = step(scheduler, worker)
    assert output.ignored == [impossible]
    assert list(plan(output)) == ["running"]
    assert not sum(scheduler.num_preemptions.values())


def test_outputs_that_together_outgrow_the_pool_end_the_group_not_the_engine() -> None:
    scheduler = make_scheduler(num_device_blocks=4)
    group = make_group("a", 4, n=4, max_tokens=12)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert {sequence.status for sequence in group.sequences} == {SequenceStatus.FINISHED_IGNORED}
    assert scheduler.blocks.device.num_free == 4


def test_a_group_that_outgrew_the_pool_leaves_its_place_to_the_next_in_the_same_step() -> None:
    scheduler = make_scheduler(num_device_blocks=2, max_num_seqs=2)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("outgrows", 3, n=2, max_tokens=9))
    scheduler.add_request(make_group("next", 4))
    while not (output := step(scheduler, worker)).ignored:
        pass
    assert list(plan(output)) == ["next"]


def test_abort_frees_every_block_at_once_wherever_the_request_is() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    worker = FakeWorker(scheduler.config)
    for name, n in (("running", 3), ("waiting", 1)):
        scheduler.add_request(make_group(name, 6, n=n, max_tokens=20))
    output = scheduler.schedule()
    answer = worker.execute(output)
    ended = scheduler.finish_requests(["running", "waiting", "unknown"], SequenceStatus.FINISHED_ABORTED)
    assert [group.request_id for group in ended] == ["running", "waiting"]
    assert scheduler.blocks.device.num_free == 16
    assert scheduler.update_from_output(output, answer) == []
    assert scheduler.finish_requests(["running"], SequenceStatus.FINISHED_ABORTED) == []  # a doubled abort
    last = scheduler.schedule()
    assert last.finished == [output.scheduled[0].sequence.id]
    assert not scheduler.has_work


def test_a_lost_worker_gives_its_groups_back_in_order_and_another_goes_on_from_their_tokens() -> None:
    waiting = WaitingQueue()
    first = make_scheduler(waiting)
    groups = [make_group(name, 6, n=n, max_tokens=6) for name, n in (("a", 1), ("b", 2), ("c", 1))]
    for group in groups:
        first.add_request(group)
    worker = FakeWorker(first.config)
    for _ in range(3):
        step(first, worker)
    first.release_all()
    assert list(waiting) == groups
    assert first.blocks.device.num_free == 16
    second = make_scheduler(waiting)
    run(second, FakeWorker(second.config))
    for group in groups:
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 64)


def test_a_request_that_brings_workers_down_ends_alone_and_the_others_finish() -> None:
    """Five requests are in the step that a worker is lost in, again and again; only one of them is the reason."""
    waiting = WaitingQueue()
    groups = [make_group(name, 6, n=n, max_tokens=5) for name, n in (("a", 1), ("b", 2), ("poison", 1), ("c", 3))]
    poison = groups[2]
    scheduler = make_scheduler(waiting)
    for group in groups:
        scheduler.add_request(group)
    worker = FakeWorker(scheduler.config)
    num_losses = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        scheduler.blocks.check()
        if poison.request_id in plan(output) and poison.sequences[0].num_output_tokens == 2:
            num_losses += 1
            ended = scheduler.release_all()
            assert ended == ([poison] if num_losses == 3 else [])
            scheduler = make_scheduler(waiting)
            worker = FakeWorker(scheduler.config)
        elif not output.is_empty:
            scheduler.update_from_output(output, worker.execute(output))
    assert num_losses == 3
    assert poison.error == "3 workers failed in a row while computing this request"
    assert poison.sequences[0].status is SequenceStatus.FINISHED_ABORTED
    for group in (groups[0], groups[1], groups[3]):
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 64)


def test_a_worker_that_is_lost_again_and_again_ends_nobody_who_gains_tokens() -> None:
    waiting = WaitingQueue()
    group = make_group("a", 6, max_tokens=8)
    waiting.append(group)
    for _ in range(8):
        scheduler = make_scheduler(waiting)
        step(scheduler, FakeWorker(scheduler.config))
        if scheduler.has_work:
            scheduler.schedule()
            assert scheduler.release_all() == []
    assert output_of(group) == reference_output(group, 0, 64)


def test_a_sequence_whose_logits_are_not_finite_ends_alone() -> None:
    scheduler = make_scheduler()
    sick, well = make_group("sick", 4), make_group("well", 4)
    scheduler.add_request(sick)
    scheduler.add_request(well)
    output = scheduler.schedule()
    failed = frozenset({sick.sequences[0].id})
    scheduler.update_from_output(output, ModelOutput(1, [0, 7], failed_sequence_ids=failed))
    assert sick.sequences[0].status is SequenceStatus.FINISHED_ABORTED
    assert sick.error is not None
    assert output_of(sick) == []
    assert output_of(well) == [7]


@pytest.mark.parametrize("answer", [ModelOutput(2, [1]), ModelOutput(1, []), ModelOutput(1, [1, 2])])
def test_an_answer_that_does_not_fit_the_step_is_refused(answer: ModelOutput) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_group("a", 4))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="the worker"):
        scheduler.update_from_output(output, answer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("num_device_blocks", 0),
        ("max_num_seqs", 0),
        ("max_model_len", -1),
        ("delay_factor", float("inf")),
        ("delay_factor", -1.0),
        ("num_host_blocks", -1),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("max_num_batched_tokens", 7),
        ("num_lookahead_slots", 64),
        ("num_lookahead_slots", -1),
        ("sliding_window", -1),
        ("max_loras", 0),
    ],
)
def test_impossible_configurations_name_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        make_scheduler(**{field: value})


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 8; it must be at least block_size \(16\)"):
        make_scheduler(max_num_batched_tokens=8, block_size=16)


requests = st.tuples(
    st.integers(1, 40),  # prompt tokens
    st.integers(1, 3),  # n
    st.integers(1, 20),  # max tokens
    st.integers(0, 4),  # min tokens
    st.sets(st.integers(0, 49), max_size=3),  # end tokens
    st.integers(0, 12),  # arrives before this step
    st.one_of(st.none(), st.integers(0, 12)),  # is aborted before this step
    st.sampled_from([0, 0, 0, 1, 2, 3]),  # beams
)


@settings(deadline=None, max_examples=500)
@given(
    st.lists(requests, min_size=1, max_size=12),
    st.integers(1, 6),  # block size
    st.integers(1, 24),  # blocks
    st.integers(1, 6),  # sequences
    st.integers(0, 30),  # further tokens in a step
    st.floats(0, 0.5),  # watermark
    st.integers(0, 16),  # host blocks
    st.sampled_from(PreemptionMode),
    st.booleans(),  # prefix caching
    st.sampled_from([WaitingQueue, PriorityQueue, FairQueue]),
    st.sampled_from(PhaseRule),
    st.sets(st.integers(0, 20), max_size=2),  # steps at which the worker is lost
    st.integers(1, 3),  # steps in flight
    st.integers(0, 3),  # lookahead slots
    st.sampled_from([0, 0, 1, 3, 8]),  # sliding window
    st.integers(1, 2),  # adapters at a time
)
def test_whatever_happens_every_request_gets_its_own_output_and_leaves_nothing_behind(
    specs: SequenceOf[tuple[int, int, int, int, set[int], int, int | None, int]],
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    more_tokens: int,
    watermark: float,
    num_host_blocks: int,
    mode: PreemptionMode,
    prefix_caching: bool,
    policy: Callable[[], WaitingQueue],
    phase_rule: PhaseRule,
    losses: set[int],
    max_in_flight: int,
    num_lookahead_slots: int,
    sliding_window: int,
    max_loras: int,
) -> None:
    sizes: dict[str, object] = {
        "num_host_blocks": num_host_blocks,
        "preemption_mode": mode,
        "prefix_caching": prefix_caching,
        "phase_rule": phase_rule,
        "delay_factor": 2.0,
        "block_bytes": 1000,
        "swap_bytes_per_second": 100_000,
        "prefill_tokens_per_second": 50 * block_size,  # recompute a block in 20 ms, as swapping takes both ways
        "block_size": block_size,
        "num_device_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs + more_tokens, block_size),
        "watermark": watermark,
        "num_lookahead_slots": min(num_lookahead_slots, num_blocks * block_size - 1),
        "sliding_window": sliding_window,
        "max_loras": max_loras,
    }
    waiting = policy()
    scheduler = make_scheduler(waiting, **sizes)
    worker = FakeWorker(scheduler.config)
    groups = [
        make_group(
            str(i),
            length,
            root=bytes(i % 3 // 2),  # two in three may share
            priority=-(i % 4),
            tenant=str(i % 3),
            lora_name=["", "a", "b", "c"][i % 4],
            n=n,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            eos_token_ids=frozenset(ends),
            beam_width=beam_width,
        )
        for i, (length, n, max_tokens, min_tokens, ends, _, _, beam_width) in enumerate(specs)
    ]
    finished: dict[Sequence, int] = {}
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    for now in range(5_000):
        for group, (*_, arrival, abort, _) in zip(groups, specs, strict=True):
            if now == arrival:
                scheduler.add_request(group)
            if now == abort:
                scheduler.finish_requests([group.request_id], SequenceStatus.FINISHED_ABORTED)
        if now in losses:
            scheduler.release_all()
            in_flight.clear()
            assert scheduler.blocks.device.num_free == num_blocks
            assert scheduler.blocks.host.num_free == num_host_blocks
            scheduler = make_scheduler(waiting, **sizes)
            worker = FakeWorker(scheduler.config)
        if now > 12 and not scheduler.has_work and not in_flight:
            break
        output = scheduler.schedule(now)
        scheduler.blocks.check()
        if phase_rule is PhaseRule.SEPARATE:
            decodes = [s for s, n, _ in output.scheduled if n == 1 and s.num_output_tokens]
            prompts = [s for s, n, _ in output.scheduled if n > 1]
            assert not (decodes and prompts) or losses or sum(scheduler.num_preemptions.values())
        assert sum(scheduled.num_tokens for scheduled in output.scheduled) <= sizes["max_num_batched_tokens"]
        assert len({group.lora_name for group in scheduler.running} - {""}) <= max_loras
        assert len(output.scheduled) <= sum(group.num_seqs for group in scheduler.running) <= max_num_seqs
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            for gained in scheduler.update_from_output(*in_flight.pop(0), now + 0.5):
                if gained.sequence.status.is_finished:
                    finished[gained.sequence] = finished.get(gained.sequence, 0) + 1
        scheduler.blocks.check()
    else:
        pytest.fail("the run does not end")
    assert scheduler.blocks.device.num_free == num_blocks
    assert scheduler.blocks.host.num_free == num_host_blocks
    assert not worker.mirrors
    assert all(count == 1 for count in finished.values())
    for group in groups:
        assert group.is_finished
        if group.beams is not None:
            if {sequence.status for sequence in group.sequences} == {SequenceStatus.FINISHED_STOPPED}:
                found = [hypothesis.token_ids for hypothesis in group.beams.hypotheses]
                assert found == reference_beams(group, scheduler.config.max_sequence_tokens)
            continue
        for index, sequence in enumerate(group.sequences):
            expected = reference_output(group, index, scheduler.config.max_sequence_tokens)
            if sequence.status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED):
                assert output_of(group, index) == expected
            else:  # aborted or ignored on the way
                assert output_of(group, index) == expected[: sequence.num_output_tokens]
