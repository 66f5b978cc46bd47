"""Whatever is done to the schedulers of a few workers that share a queue, in whatever order, they keep their promises.

Requests come, are aborted and cut short; steps are planned ahead and answered late; workers are drained and lost.
After every operation no sequence has a block too many, no step is too large, and no place is taken out of turn.
"""

from collections import Counter
from itertools import chain, combinations
from random import Random

from fake_worker import FakeWorker, read_tokens, reference_beams, reference_output
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_helpers import output_of
from slow_balancer import CheckedBalancer
from workloads import (
    random_config,
    random_request,
    sharing,
    with_encoder,
    with_encoder_cache,
    with_few_adapters,
    with_images,
    with_layer_groups,
)

from scheduler_service.core import (
    FairQueue,
    ModelOutput,
    PriorityQueue,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.placement.balancer import MAX_OVERTAKES

WEIGHTS = {"x": 2.0}
ANY = st.integers(0, 2**16)
"""Which of those there are: taken modulo their number."""


class Session:
    """A scheduler, its worker, and the steps between them without an answer."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue) -> None:
        self.scheduler = Scheduler(config, waiting)
        self.worker = FakeWorker(config)
        self.in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
        self.num_steps = 0
        self.lacking: list[str] = []

    @property
    def sequences(self) -> dict[int, Sequence]:
        groups = [*self.scheduler.running, *self.scheduler.swapped]
        return {sequence.id: sequence for group in groups for sequence in group.with_tables if sequence.id}


class Fleet(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        num_workers=st.integers(1, 4),
        overtakes=st.integers(1, 4),
        max_in_flight=st.integers(1, 3),
    )
    def start(self, seed: int, policy: str, num_workers: int, overtakes: int, max_in_flight: int) -> None:
        queues = {"fcfs": WaitingQueue(), "priority": PriorityQueue(overtakes), "fair": FairQueue(WEIGHTS)}
        self.policy, self.overtakes, self.max_in_flight = policy, overtakes, max_in_flight
        self.waiting = queues[policy]
        self.waiting.balancer = self.balancer = CheckedBalancer()
        config = random_config(Random(seed), (1, 4, 6, 7, 8, 9, 10, 11, 12))
        self.config = with_encoder_cache(with_layer_groups(with_few_adapters(config, seed), seed), seed)
        self.sessions = [Session(self.config, self.waiting) for _ in range(num_workers)]
        self.groups: list[SequenceGroup] = []  # in the order of arrival
        self.has_started: set[SequenceGroup] = set()
        self.overtaken: Counter[SequenceGroup] = Counter()
        self.ends: Counter[Sequence | SequenceGroup] = Counter()  # of outputs, and of searches as a whole
        self.cut: set[Sequence] = set()
        self.num_lost = 0
        self.now = 0.0

    # ---- what may happen

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 6), share=st.booleans())
    def add_requests(self, seed: int, count: int, share: bool) -> None:
        rng = Random(seed)
        for _ in range(count):
            request, has_images = random_request(rng, len(self.groups)), rng.random() < 0.4
            request = request if has_images else with_encoder(rng, request)
            request = sharing(request) if share else request
            if has_images:
                request = with_images(Random(0) if share else rng, request)
            group = request.group(self.now)
            self.groups.append(group)
            self.sessions[0].scheduler.add_request(group)

    @rule(which=ANY)
    def plan(self, which: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        if len(session.in_flight) >= self.max_in_flight:
            return
        served = dict(self.waiting.counters) if self.policy == "fair" else {}
        output = session.scheduler.schedule(self.now)
        self.see_which_started(output, served, session.scheduler)
        session.lacking = output.lacking_adapters
        for group in output.ignored:
            assert group.error
            self.see_end_of(group, SequenceStatus.FINISHED_IGNORED)
        assert output.step_id == session.num_steps + 1
        encoded = sum(num_tokens for sequence, num_tokens, _ in output.scheduled if sequence.is_encoder)
        assert encoded <= self.config.max_num_encoder_tokens
        assert output.num_tokens - encoded <= self.config.max_num_batched_tokens
        assert len({scheduled.sequence for scheduled in output.scheduled}) == len(output.scheduled)
        if not output.is_empty:
            session.num_steps += 1
            session.in_flight.append((output, session.worker.execute(output)))

    @rule(which=ANY)
    def take_answer_in(self, which: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        if session.in_flight:
            gained = session.scheduler.update_from_output(*session.in_flight.pop(0), self.now)
            for sequence in {output.sequence for output in gained if output.sequence.status.is_finished}:
                self.ends[sequence.group if sequence.group.beams else sequence] += 1

    @rule(which=ANY, is_held=st.sampled_from([True, True, True, False]), preloads=st.lists(st.sampled_from("abd")))
    def bring_adapter(self, which: int, is_held: bool, preloads: list[str]) -> None:
        """One comes, or fails to, and another one is on its way from then on."""
        session = self.sessions[which % len(self.sessions)]
        adapters = session.scheduler.adapters
        if adapters.is_fetching:
            session.scheduler.end_fetch(0.5 if is_held else None)
        before = adapters.held
        fetch = session.scheduler.begin_fetch(session.lacking, preloads)
        if fetch is not None:
            assert fetch.adapter_id not in before
            assert adapters.held == before - {fetch.dropped}
            is_full = len(before) == self.config.max_held_loras
            assert bool(fetch.dropped) == is_full
            assert fetch.adapter_id in (session.lacking if is_full else [*session.lacking, *preloads])

    @rule(which=ANY, name=st.sampled_from("abcd"))
    def unload_adapter(self, which: int, name: str) -> None:
        scheduler = self.sessions[which % len(self.sessions)].scheduler
        if any(group.adapter_id == name for group in (*scheduler.running, *scheduler.swapped)):
            return
        was_held = name in scheduler.adapters.held
        assert scheduler.drop_adapter(name) == was_held
        assert name not in scheduler.adapters.held

    @rule(num_rounds=st.integers(1, 12))
    def serve(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for number, session in enumerate(self.sessions):
                self.plan(number)
                self.bring_adapter(number, is_held=True, preloads=[])
                self.check_everything()
                if len(session.in_flight) == self.max_in_flight or not session.scheduler.has_work:
                    self.take_answer_in(number)
            self.now += 0.5

    @precondition(lambda self: self.groups)
    @rule(which=ANY, times=st.integers(1, 2))
    def abort(self, which: int, times: int) -> None:
        """A request that waits, runs, is swapped out or has ended, on every worker: its place need not be known."""
        on_workers = [g for s in self.sessions for g in (*s.scheduler.swapped, *s.scheduler.running)]
        there = on_workers if which % 2 and on_workers else self.groups
        group = there[which // 2 % len(there)]
        was_live = not group.is_finished
        ended = [
            done
            for _ in range(times)
            for session in self.sessions
            for done in session.scheduler.finish_requests([group.request_id], SequenceStatus.FINISHED_ABORTED)
        ]
        assert ended == [group] * was_live
        if was_live:
            self.see_end_of(group, SequenceStatus.FINISHED_ABORTED)

    @rule(which=ANY)
    def abort_unknown(self, which: int) -> None:
        scheduler = self.sessions[which % len(self.sessions)].scheduler
        assert scheduler.finish_requests(["unknown"], SequenceStatus.FINISHED_ABORTED) == []

    @precondition(lambda self: any(session.sequences for session in self.sessions))
    @rule(which=ANY, times=st.integers(1, 2))
    def end_one_sequence(self, which: int, times: int) -> None:
        """As a stop string does."""
        there = [(s.scheduler, one) for s in self.sessions for one in s.sequences.values() if not one.is_encoder]
        scheduler, sequence = there[which % len(there)]
        if sequence.group.beams is None:
            for _ in range(times):
                scheduler.finish_sequence(sequence, SequenceStatus.FINISHED_STOPPED)
            self.cut.add(sequence)
            self.ends[sequence] += 1

    @precondition(lambda self: self.num_lost < 1 + len(self.groups) // 4)
    @rule(which=ANY)
    def lose_worker(self, which: int) -> None:
        self.num_lost += 1
        number = which % len(self.sessions)
        scheduler = self.sessions[number].scheduler
        for group in scheduler.release_all():
            self.see_end_of(group, SequenceStatus.FINISHED_ABORTED)
        assert scheduler.blocks.device.num_free == self.config.num_device_blocks
        assert scheduler.blocks.host.num_free == self.config.num_host_blocks
        self.sessions[number] = Session(self.config, self.waiting)

    @rule(which=ANY)
    def drain_or_undrain(self, which: int) -> None:
        scheduler = self.sessions[which % len(self.sessions)].scheduler
        scheduler.set_admission(not scheduler.admits)

    @rule(which=ANY)
    def reset_prefix_cache(self, which: int) -> None:
        scheduler = self.sessions[which % len(self.sessions)].scheduler
        num_free = scheduler.blocks.device.num_free
        scheduler.reset_prefix_cache()
        assert scheduler.blocks.device.num_free >= num_free  # kept states become free
        assert not scheduler.blocks.device.num_findable

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # ---- what is promised

    def see_end_of(self, group: SequenceGroup, status: SequenceStatus) -> None:
        assert group.is_finished
        if group.beams:
            self.ends[group] += 1
        else:
            self.ends.update(sequence for sequence in group.sequences if sequence.status is status)

    def see_which_started(self, output: SchedulerOutput, served: dict[str, float], scheduler: Scheduler) -> None:
        """Few groups start before others whose turn it was: another worker is better or has a slot for those, or
        their prefix is being computed.

        Those of an adapter that is still to be brought there are not counted, because they lose nothing by it.
        `served` is what each tenant had been given before this step; the first admission of a group adds its prompt,
        and what its encoder reads.
        """
        for group in (placement.group for placement in output.placements if placement.to is None):
            if group in self.has_started:
                continue
            self.has_started.add(group)
            for other in self.groups:
                if other.request_id not in self.waiting or other in self.has_started:
                    continue
                if not scheduler.adapters.holds(other.adapter_id):
                    continue
                if self.is_later(group, other, served):
                    self.overtaken[other] += 1
                    assert self.overtaken[other] <= MAX_OVERTAKES
                    assert other.adapter_id or len(self.sessions) > 1 or other.placement.prefix_waits
            if self.policy == "fair":
                served[group.tenant] += group.num_prompt_tokens / WEIGHTS.get(group.tenant, 1.0)

    def is_later(self, group: SequenceGroup, other: SequenceGroup, served: dict[str, float]) -> bool:
        """Whether the other's turn is before the group's: by arrival, priority and age, or what tenants have had."""
        if self.policy == "fair" and group.tenant != other.tenant:
            return (served[group.tenant], group.tenant) > (served[other.tenant], other.tenant)
        weight = self.overtakes if self.policy == "priority" else 0
        (number, rank), (other_number, other_rank) = (
            (self.groups.index(g), weight * g.priority + self.groups.index(g)) for g in (group, other)
        )
        return (rank, number) > (other_rank, other_number)

    @invariant()
    def check_everything(self) -> None:
        for session in self.sessions:
            scheduler = session.scheduler
            scheduler.blocks.check()
            scheduler.encoder_cache.check()
            assert scheduler.num_running_seqs == sum(group.num_seqs for group in scheduler.running)
            assert sum(group.num_seqs for group in scheduler.running) <= self.config.max_num_seqs
            assert scheduler.running_adapters == Counter(g.adapter_id for g in scheduler.running if g.adapter_id)
            assert len(scheduler.running_adapters) <= self.config.max_loras
            if self.config.max_held_loras:
                here = {group.adapter_id for group in (*scheduler.running, *scheduler.swapped)} - {""}
                assert here <= scheduler.adapters.held
                assert len(scheduler.adapters.held) + scheduler.adapters.is_fetching <= self.config.max_held_loras
            self.check_sharing(session)
        self.balancer.check()
        assert len(self.balancer) == len(self.sessions)
        places = [place for s in self.sessions for place in (s.scheduler.running, s.scheduler.swapped)]
        for group in self.groups:
            assert group.placement.num_overtaken <= MAX_OVERTAKES
            num_places = sum(group in place for place in places) + (group.request_id in self.waiting)
            assert num_places == (not group.is_finished)
        assert all(count == 1 for count in self.ends.values()), "something ended twice"

    def check_sharing(self, session: Session) -> None:
        """Blocks are shared by those whose tokens in it and before it are the same, and between requests when full."""
        sequences = session.sequences
        pools = (session.scheduler.blocks.all_tables, session.scheduler.blocks.all_host_tables)
        for layers, tables in chain(*(zip(self.config.groups, all_tables, strict=True) for all_tables in pools)):
            size = layers.block_size
            holders: dict[int, list[tuple[Sequence, int]]] = {}
            for sequence_id, table in tables.items():
                for index, block in enumerate(table):
                    holders.setdefault(block, []).append((sequences[sequence_id], index))
            holders.pop(-1, None)
            for (one, index), (other, other_index) in (p for held in holders.values() for p in combinations(held, 2)):
                assert index == other_index
                assert one.is_encoder == other.is_encoder
                if one.is_encoder:  # of two requests, for those of one share its table as a whole
                    assert one.token_ids == other.token_ids
                    assert self.config.prefix_caching
                    assert one.group.cache_root == other.group.cache_root
                    continue
                num_common = min((index + 1) * size, one.num_computed_tokens, other.num_computed_tokens)
                assert read_tokens(one)[:num_common] == read_tokens(other)[:num_common]
                if one.group is not other.group:
                    assert self.config.prefix_caching
                    behind = [s for s in (one, other) if s.num_computed_tokens < (index + 1) * size]
                    assert all(s.index > 0 or s.group.beams for s in behind)  # forks, that copy it before they write
                    assert one.group.cache_root == other.group.cache_root
                    assert one.group.encoder_input == other.group.encoder_input

    def teardown(self) -> None:
        if not hasattr(self, "sessions"):
            return
        for session in self.sessions:
            session.scheduler.set_admission(True)
        num_tokens = sum(group.num_seqs * (len(group.prompt_token_ids) + 16) for group in self.groups)
        for _ in range(20 + 4 * num_tokens):
            if not any(session.scheduler.has_work or session.in_flight for session in self.sessions):
                break
            for number, session in enumerate(self.sessions):
                num_steps = session.num_steps
                self.plan(number)
                self.bring_adapter(number, is_held=True, preloads=[])
                if session.num_steps == num_steps or len(session.in_flight) == self.max_in_flight:
                    self.take_answer_in(number)
            self.now += 1.0
            self.check_everything()
        else:
            raise AssertionError("the run does not end")
        for session in self.sessions:
            assert session.scheduler.blocks.device.num_free == self.config.num_device_blocks
            assert session.scheduler.blocks.host.num_free == self.config.num_host_blocks
            assert not session.worker.mirrors
            assert not session.scheduler.encoder_cache.num_used
        for group in self.groups:
            self.check_output(group)

    def check_output(self, group: SequenceGroup) -> None:
        limit = self.config.max_sequence_tokens
        if group.beams:
            assert self.ends[group] == 1
            if {sequence.status for sequence in group.sequences} == {SequenceStatus.FINISHED_STOPPED}:
                assert [found.token_ids for found in group.beams.hypotheses] == reference_beams(group, limit)
            return
        for index, sequence in enumerate(group.sequences):
            assert self.ends[sequence] == 1
            expected = reference_output(group, index, limit)
            is_whole = sequence not in self.cut and sequence.status in (
                SequenceStatus.FINISHED_STOPPED,
                SequenceStatus.FINISHED_LENGTH_CAPPED,
            )
            assert output_of(group, index) == (expected if is_whole else expected[: sequence.num_output_tokens])


Fleet.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestFleet = Fleet.TestCase
