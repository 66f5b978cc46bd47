"""The scheduler decides in every step what the slow, obvious one decides, whatever the workload."""

from dataclasses import dataclass
from itertools import count, takewhile
from random import Random
from unittest import mock

from fake_worker import candidates, prefix_of, sample
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow_groups import SlowGroup, SlowQueue
from slow_scheduler import SlowScheduler, SlowStep
from workloads import (
    IMAGES,
    Request,
    random_config,
    random_request,
    sharing,
    with_encoder,
    with_encoder_cache,
    with_few_adapters,
    with_images,
    with_layer_groups,
    with_shared_prefixes,
)

from scheduler_service.core import (
    EncoderItem,
    FairQueue,
    ModelOutput,
    PreemptionMode,
    PriorityQueue,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.blocks import states
from scheduler_service.core.blocks.tables import NO_BLOCK
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.core.queues import waiting_queue

WEIGHTS = {"x": 3.0}


@dataclass
class Event:
    """Before a step a request arrives, and before another one, or never, it or one output of it is ended."""

    request: Request
    arrives: int
    ends: int | None
    ends_index: int | None


def random_event(rng: Random, number: int, *, has_encoder: bool, has_images: bool, shares: bool) -> Event:
    ends = rng.choice([None, None, None, None, rng.randrange(24)])
    request = random_request(rng, number)
    if has_encoder:
        request = with_encoder(rng, request)
    if shares:
        request = sharing(request)
    if has_images:
        request = with_images(Random(f"images {number % 3}") if shares else rng, request)
    return Event(request, rng.randrange(16), ends, rng.choice([None, None, 0, 1]))


def label(sequence: Sequence) -> tuple[str, int, int]:
    return sequence.group.request_id, sequence.index, len(sequence.token_ids)


def next_tokens(sequence: Sequence, number: int) -> list[int]:
    """How it goes on: a function of its tokens, and of which output it is."""
    known = list(sequence.token_ids)
    for _ in range(number):
        known.append(sample(prefix_of(known), sequence.index) % 25)
    return known[len(known) - number :]


class Both:
    """The scheduler and the slow one, told the same."""

    def __init__(self, config: SchedulerConfig, policy: str, overtakes: int) -> None:
        queues = {"fcfs": WaitingQueue(), "priority": PriorityQueue(overtakes), "fair": FairQueue(WEIGHTS)}
        self.fast = Scheduler(config, queues[policy])
        self.slow = SlowScheduler(config, SlowQueue(policy, overtakes, WEIGHTS))
        self.groups: list[tuple[SequenceGroup, SlowGroup]] = []
        self.sequences: dict[int, Sequence] = {}  # that were ever scheduled
        self.told: dict[int, list[list[int]]] = {}  # the tables of sequences, as the worker knows them

    def add(self, request: Request, now: float) -> None:
        fast = request.group(now)
        slow = SlowGroup(
            request.name,
            request.prompt,
            request.sampling,
            request.root + request.adapter_id.encode(),  # no cache is shared between adapters
            request.encoder,
            request.images,
            priority=request.priority,
            tenant=request.tenant,
            lora=request.adapter_id,
            arrived_at=now,
        )
        self.groups.append((fast, slow))
        self.fast.add_request(fast)
        self.slow.queue.arrive(slow)

    def end(self, name: str, index: int | None) -> None:
        """Abort a request, or end the one of its sequences that has this index."""
        for fast, slow in self.groups:
            if fast.request_id == name and index is None:
                self.fast.finish_requests([name], SequenceStatus.FINISHED_ABORTED)
                for sequence in slow.live:
                    self.slow.end(sequence, SequenceStatus.FINISHED_ABORTED)
            elif fast.request_id == name and index < len(fast.sequences) and not fast.beams:
                self.fast.finish_sequence(fast.sequences[index], SequenceStatus.FINISHED_STOPPED)
                self.slow.end(slow.sequences[index], SequenceStatus.FINISHED_STOPPED)

    def schedule(self, now: float) -> tuple[SchedulerOutput, SlowStep]:
        output, step = self.fast.schedule(now), self.slow.schedule(now)
        scheduled = [sequence for sequence, _, _ in output.scheduled]
        scheduled += [new.sequence for new in output.new_sequences] + [fork.child for fork in output.forks]
        scheduled += [sequence.group.encoder for sequence in scheduled if sequence.group.encoder]
        self.sequences |= {sequence.id: sequence for sequence in scheduled}
        decisions = {
            "scheduled": [(label(s), s.num_computed_tokens, n, samples) for s, n, samples in output.scheduled],
            "rooms": {label(sequence): room for sequence, room in output.num_draft_tokens.items()},
            "preempted": [label(self.sequences[sequence_id]) for sequence_id in output.preempted],
            "ignored": [group.request_id for group in output.ignored],
            "finished": [label(self.sequences[sequence_id]) for sequence_id in output.finished],
            "copies": len(output.blocks_to_copy),
            "swapped out": len(output.blocks_to_swap_out),
            "swapped in": len(output.blocks_to_swap_in),
            "lacking": output.lacking_adapters,
            "encoded": [*output.items_to_encode],
            "dropped": [*output.dropped_embeddings],
            "ahead": [*output.images_ahead],
        }
        assert decisions == step.decisions
        assert output.is_empty == step.is_empty
        self.tell(output)
        self.compare()
        return output, step

    def tell(self, output: SchedulerOutput) -> None:
        """Assert that the worker knows all blocks that sequences in a step can attend to."""
        for sequence, table, _, further, _ in output.new_sequences:
            self.told[sequence.id] = [[*one] for one in (table, *further)]
        for _, child, _, table, _, further in output.forks:
            self.told[child.id] = [[*one] for one in (table, *further)]
        for update in output.block_table_updates:
            self.told[update.sequence_id][update.layer_group][update.start :] = update.block_ids
        for sequence, _, _ in output.scheduled:
            for told, tables in zip(self.told[sequence.id], self.fast.blocks.all_tables, strict=False):
                pairs = zip(told, tables[sequence.id], strict=True)
                assert all(block in (known, NO_BLOCK) for known, block in pairs)

    def compare(self) -> None:
        fast, slow = self.fast, self.slow
        assert [group.request_id for group in fast.running] == [group.name for group in slow.running]
        assert [group.request_id for group in fast.swapped] == [group.name for group in slow.swapped]
        assert {group.request_id for group in fast.waiting} == {group.name for group in slow.queue.groups}
        assert len(fast.waiting) == len(slow.queue.groups)
        if fast.waiting:
            assert fast.waiting.head.request_id == slow.queue.head.name
        assert fast.adapters.held == set(slow.adapters.held)
        assert fast.blocks.device.num_free == slow.num_free
        assert fast.blocks.host.num_free == slow.num_host_free
        assert fast.num_preemptions == slow.num_preemptions
        assert fast.num_preemptions == {
            PreemptionMode.RECOMPUTE: sum(group.history.num_recomputes for group, _ in self.groups),
            PreemptionMode.SWAP: sum(group.history.num_swaps for group, _ in self.groups),
        }
        for fast_group, slow_group in self.groups:
            assert fast_group.history.num_cached_tokens == slow_group.num_cached
            assert fast_group.placement.num_overtaken == slow_group.num_overtaken
            assert [(s.token_ids, s.status.is_finished and s.status) for s in fast_group.sequences] == [
                (s.token_ids, s.status or False) for s in slow_group.sequences
            ]
        fast.blocks.check()
        fast.encoder_cache.check()
        for known in fast.blocks._num_known:
            assert known.keys() <= fast.blocks.tables.keys() | fast.blocks.host_tables.keys()
        assert fast.num_running_seqs == sum(group.num_seqs for group in fast.running)

    def reset_prefix_cache(self) -> None:
        assert self.fast.reset_prefix_cache() == self.slow.reset_prefix_cache()
        self.compare()

    def bring_adapters(self, lacking: list[str], rng: Random) -> None:
        """One ends that was begun, or fails; another begins, also one that no group lacks; one is dropped or is there
        of itself."""
        fast, slow = self.fast, self.slow
        if slow.adapters.fetching and rng.random() < 0.5:
            is_held = rng.random() < 0.8
            fast.end_fetch(0.1 if is_held else None)
            slow.adapters.end_fetch(is_held)
        wanted = rng.choice([lacking, lacking, lacking, ["c", *lacking]])
        preloads = rng.choice([[], ["b", "d"]])
        assert fast.begin_fetch(wanted, preloads) == slow.adapters.begin_fetch(wanted, preloads)
        name = rng.choice("abcd")
        if rng.random() < 0.1 and name not in {group.lora for group in slow.running + slow.swapped}:
            assert fast.drop_adapter(name) == (name in slow.adapters.held)
            slow.adapters.drop(name)
        self.compare()

    def take_in(self, output: SchedulerOutput, step: SlowStep, now: float, drafting: Random) -> None:
        """The worker's answer: a function of what is known of each sequence when the answer comes. It has verified as
        many draft tokens as there is room for, or fewer, and wants room for none, some, or too many."""
        wanted = {}
        answer, answers = ModelOutput(output.step_id, []), []
        for (sequence, _, samples), (slow_sequence, *_) in zip(output.scheduled, step.chunks, strict=True):
            if samples:
                num_drafted, likeliest = drafting.randint(0, step.rooms.get(slow_sequence, 0)), []
                num_right = sum(1 for _ in takewhile(lambda _: drafting.random() < 0.8, range(num_drafted)))
                tokens = next_tokens(sequence, 1 + num_right)
                wanted[slow_sequence] = drafting.randint(0, 7)
                if sequence.sampling.beam_width:
                    likeliest = candidates(prefix_of(sequence.token_ids))[: sequence.sampling.num_logprobs]
                    answer.logprobs[sequence.id] = [
                        TokenLogprobs([*tokens, *(t for t, _ in likeliest)], [0.0, *(p for _, p in likeliest)], 1)
                    ]
                answer.token_ids += tokens
                answer.num_tokens.append(len(tokens))
                answer.num_draft_tokens.append(num_drafted)
                answers.append((tokens, likeliest))
        if not step.rooms:
            answer.num_tokens.clear()
            answer.num_draft_tokens.clear()
        if self.fast.config.num_lookahead_slots and drafting.random() < 0.5:
            answer.num_draft_tokens_wanted = list(wanted.values())
            self.slow.want(step, wanted)
        if self.fast.config.prepares_images:
            names = [EncoderItem(digest, part) for digest, parts in IMAGES.items() for part in range(len(parts))]
            likely = 0.3 if output.scheduled else 1
            answer.prepared_items = [name for name in names if drafting.random() < likely]
            self.slow.images.prepared = {*self.slow.images.told} & {*answer.prepared_items}
        self.fast.update_from_output(output, answer, now)
        self.slow.take_in(step, answers, now)
        self.compare()


@settings(max_examples=250)
@given(
    st.integers(0, 2**32),
    st.lists(st.booleans(), min_size=18, max_size=18),
    st.booleans(),
    st.just(True),
    st.booleans(),
)
# Tokens that a preempted group gives back are handed out.
@example(7300, [i in (4, 11, 12) for i in range(18)], False, False, False)
# A group whose leader ended is new again in the same step.
@example(73633789, [i in (4, 6) for i in range(18)], False, False, False)
# Groups of layers without a window, which share more of a prompt than followers of a window could.
@example(2965593632, [i in (11, 13, 14) for i in range(18)], False, True, False)
# A group whose first token is within an image, for which there is no room.
@example(3834118, [i in (4, 16) for i in range(18)], True, True, True)
# A group is swapped out while it has tokens of an image to compute.
@example(341602084, [i in (1, 11, 15) for i in range(18)], False, False, True)
def test_every_decision_is_that_of_the_slow_scheduler(
    seed: int, takes_part: list[bool], share: bool, divides_layers: bool, images: bool
) -> None:
    """What may happen follows from the seed; which requests take part is chosen, so that a failure shrinks to few, and
    whether they share their prompts. Most workers' layers are in one to four groups. A step's looks at those that wait
    for a prefix may end early. Half of all workers have prompts with images."""
    with (
        mock.patch.object(waiting_queue, "MAX_SHARING", Random(f"{seed} most").choice([1, 2, 256])),
        mock.patch.object(states, "OUTPUT_SPACING", Random(f"{seed} spacing").choice([1, 4, 8])),
    ):
        compare_decisions(seed, takes_part, share=share, divides_layers=divides_layers, images=images)


def compare_decisions(seed: int, takes_part: list[bool], *, share: bool, divides_layers: bool, images: bool) -> None:
    rng = Random(seed)
    config = with_few_adapters(random_config(rng, (2, 5, 7, 8, 9, 10, 11, 12, 14, 16, 20)), seed)
    if share:
        config = with_shared_prefixes(config, seed)
    if divides_layers:
        config = with_layer_groups(config, seed)
    if images:
        config = with_encoder_cache(config, seed)
    both = Both(config, rng.choice(["fcfs", "priority", "priority", "fair"]), overtakes=rng.randint(1, 6))
    max_in_flight = rng.randint(1, 4)
    numbers = [number for number, takes in enumerate(takes_part) if takes]
    has_encoder = seed % 2 == 1 and config.max_num_encoder_tokens > 0
    has_images = images and not has_encoder
    workload = [
        random_event(Random(f"{seed} {i}"), i, has_encoder=has_encoder, has_images=has_images, shares=share)
        for i in numbers
    ]
    in_flight: list[tuple[SchedulerOutput, SlowStep]] = []
    drafts, adapters, resets = (Random(f"{seed} {name}") for name in ("drafts", "adapters", "resets"))
    for now in count():
        for event in workload:
            if event.arrives == now:
                both.add(event.request, now)
            if event.ends == now:
                both.end(event.request.name, event.ends_index)
        if resets.random() < 0.05:
            both.reset_prefix_cache()
        output, step = both.schedule(now)
        if config.max_held_loras:
            both.bring_adapters(output.lacking_adapters, adapters)
        if not output.is_empty:
            in_flight.append((output, step))
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            both.take_in(*in_flight.pop(0), now + 0.5, drafts)
        if now > 24 and not both.fast.has_work and not in_flight:
            break
        assert now < 3000, "the run does not end"
    assert both.slow.num_free == config.num_device_blocks
