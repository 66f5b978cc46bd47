"""Images are encoded when a chunk first needs them, once while they are kept, and never beyond cache and budget."""

import pytest
from fake_encoder import FakeEncoder
from fake_worker import FakeWorker, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_image, make_scheduler, output_of, plan, run, step

from scheduler_service.core import (
    EncoderItem,
    ModelOutput,
    PhaseRule,
    PreemptionMode,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
)
from scheduler_service.core.planning.encoder_cache import EncoderCache


def with_images(name: str, *images: tuple[str, int, int], num_tokens: int = 20, **options: object) -> SequenceGroup:
    """Each request has a cache root of its own, so that only the encoder cache saves work."""
    items = tuple(make_image(*image) for image in images)
    return make_group(name, num_tokens, root=name.encode(), items=items, **options)  # type: ignore[arg-type]


def scheduler_with(size: int, budget: int = 0, **sizes: object) -> tuple[Scheduler, FakeWorker]:
    defaults: dict[str, object] = {"num_device_blocks": 64, "encoder_cache_size": size, "encoder_budget": budget}
    scheduler = make_scheduler(**(defaults | sizes))
    return scheduler, FakeWorker(scheduler.config)


def names(*images: tuple[str, int, int]) -> list[EncoderItem]:
    return [make_image(*image).encoder_item for image in images]


A, B, C = ("a", 2, 4), ("b", 8, 4), ("c", 12, 4)


def test_a_chunk_ends_before_an_image_for_which_the_step_has_no_budget() -> None:
    scheduler, worker = scheduler_with(20, budget=8)
    scheduler.add_request(with_images("all", A, B, C))
    scheduler.add_request(with_images("later", ("d", 3, 2)))
    first, second = step(scheduler, worker), step(scheduler, worker)
    assert plan(first) == {"all": [12], "later": [3]}
    assert first.items_to_encode == names(A, B)
    assert plan(second) == {"all": [8], "later": [17]}
    assert second.items_to_encode == names(C, ("d", 3, 2))
    single, worker = scheduler_with(20)
    single.add_request(with_images("all", A, B, C))
    assert [plan(step(single, worker)) for _ in range(3)] == [{"all": [8]}, {"all": [4]}, {"all": [8]}]


def test_a_chunk_ends_before_an_image_for_which_the_cache_has_no_room_until_another_is_computed() -> None:
    scheduler, worker = scheduler_with(6, budget=20)
    scheduler.add_request(with_images("first", A))
    scheduler.add_request(with_images("second", B))
    steps = [step(scheduler, worker) for _ in range(2)]
    assert [plan(output) for output in steps] == [{"first": [20], "second": [8]}, {"first": [1], "second": [12]}]
    assert [output.items_to_encode for output in steps] == [names(A), names(B)]
    assert steps[1].dropped_embeddings == names(A)


def test_an_image_of_two_requests_is_encoded_once_and_kept_after_their_end() -> None:
    scheduler, worker = scheduler_with(20)
    for name in "pq":
        scheduler.add_request(with_images(name, A))
    assert step(scheduler, worker).items_to_encode == names(A)
    run(scheduler, worker)
    scheduler.add_request(with_images("later", A, B))
    assert step(scheduler, worker).items_to_encode == names(B)
    counts = scheduler.encoder_cache.counts
    assert (counts.num_queries, counts.num_hits, counts.num_encoded, counts.num_encoded_tokens) == (4, 2, 2, 8)


def test_the_image_that_was_read_longest_ago_gives_way_but_never_one_in_use() -> None:
    scheduler, worker = scheduler_with(12, max_prefill_chunk=3, max_num_batched_tokens=8)
    for group in (with_images("a", A), with_images("b", B), with_images("again", A)):
        scheduler.add_request(group)
        run(scheduler, worker)
    scheduler.add_request(with_images("in use", A))
    step(scheduler, worker)
    scheduler.add_request(with_images("new", ("d", 0, 4), ("e", 4, 4), num_tokens=8))
    dropped = []
    while scheduler.has_work:
        dropped += step(scheduler, worker).dropped_embeddings
    assert dropped == names(B)
    scheduler.add_request(with_images("third", B))
    run(scheduler, worker)
    assert [*worker.encoder.held] == names(("d", 0, 4), ("e", 4, 4), B)


def test_of_an_image_that_two_chunks_need_the_second_has_it_if_the_first_is_taken_back() -> None:
    scheduler, _ = scheduler_with(4)
    cache = EncoderCache(scheduler.config)
    first, second = (with_images(name, A).sequences[0] for name in "pq")
    other = with_images("other", B)
    for sequence in (first, second):
        cache.use(sequence, 4)
    cache.release([first])
    assert cache.reach(other.images, 0, 20) == 8, "the room was given away"
    cache.read(second, 4)
    cache.written(output := SchedulerOutput(1))
    assert output.items_to_encode == names(A)
    assert cache.counts.num_encoded_tokens == 4
    cache.release([second])
    cache.use(other.sequences[0], 20)
    cache.release(other.sequences)
    assert cache.reach(with_images("c", C).images, 0, 20) == 20, "a chunk that was taken back spent the budget"
    cache.written(output := SchedulerOutput(2))
    assert output.dropped_embeddings == [], "room is made for a chunk that was taken back"


@pytest.mark.parametrize("phase_rule", PhaseRule)
def test_an_image_at_the_end_of_a_prompt_stays_until_all_outputs_have_begun(phase_rule: PhaseRule) -> None:
    """Also if other prompts are computed before the outputs begin."""
    scheduler, worker = scheduler_with(6, max_num_batched_tokens=8, phase_rule=phase_rule)
    scheduler.add_request(with_images("several", ("end", 2, 6), num_tokens=8, n=3))
    scheduler.add_request(with_images("other", A))
    encoded = []
    while scheduler.has_work:
        encoded.append(step(scheduler, worker).items_to_encode)
    assert [new for new in encoded if new] == [names(("end", 2, 6)), names(A)]


def test_an_image_whose_tokens_are_cached_is_not_encoded() -> None:
    scheduler, worker = scheduler_with(9)
    scheduler.add_request(make_group("first", 20, items=(make_image(*A),)))
    run(scheduler, worker)
    scheduler.encoder_cache.fail(names(A))
    scheduler.add_request(make_group("again", 20, items=(make_image(*A),)))
    run(scheduler, worker)
    assert worker.encoder.num_encoded == 1


def test_a_group_that_resumes_encodes_only_images_of_which_it_computes_a_token() -> None:
    scheduler, worker = scheduler_with(
        6, num_device_blocks=10, num_host_blocks=20, preemption_mode=PreemptionMode.SWAP, max_model_len=40
    )
    groups = [with_images(name, (name, 1, 5), ("both", 8, 6), max_tokens=16) for name in "pq"]
    for group in groups:
        scheduler.add_request(group)
    run(scheduler, worker)
    assert scheduler.num_preemptions[PreemptionMode.SWAP]
    assert worker.encoder.num_encoded <= 4
    assert [output_of(group) for group in groups] == [reference_output(group, 0, 40) for group in groups]


def test_a_group_that_is_swapped_in_and_waits_for_its_image_is_not_swapped_out_by_the_same_step() -> None:
    """Decodes of the same step take its room. Its blocks are not filled yet."""
    sizes = {"num_device_blocks": 8, "num_host_blocks": 60, "max_num_batched_tokens": 8, "prepares_images": True}
    separate = {"phase_rule": PhaseRule.SEPARATE, "preemption_mode": PreemptionMode.SWAP}
    scheduler, worker = scheduler_with(20, **sizes, **separate)
    texts = [(3, 6), (3, 9), (4, 12), (3, 7)]
    groups = [make_group(str(n), size, root=bytes([n]), max_tokens=most) for n, (size, most) in enumerate(texts)]
    groups.insert(3, with_images("image", A, max_tokens=5))
    for group in groups:
        scheduler.add_request(group)
    run(scheduler, worker)
    assert min(scheduler.num_preemptions.values()) > 0
    assert [output_of(group) for group in groups] == [reference_output(group, 0, 64) for group in groups]


def test_tokens_of_an_image_wait_until_the_worker_has_prepared_it_and_other_sequences_do_not_wait() -> None:
    scheduler, worker = scheduler_with(20, prepares_images=True, max_num_batched_tokens=30)
    scheduler.add_request(make_group("text", 3, max_tokens=20))
    step(scheduler, worker)
    scheduler.add_request(with_images("seen", A, B))
    found = [(plan(output := step(scheduler, worker)), [*output.items_to_encode]) for _ in range(6)]
    assert found[0] == ({"text": [1], "seen": [2]}, [])
    held = [number for number, (chunks, _) in enumerate(found) if "seen" not in chunks]
    assert held
    assert all("text" in chunks for chunks, _ in found)
    assert [(chunks["seen"], new) for chunks, new in found[1:3] if "seen" in chunks] == [([6], names(A))]
    run(scheduler, worker)
    assert worker.encoder.num_encoded == 2


def test_a_step_without_chunks_asks_for_a_report_if_nothing_can_be_computed_and_delays_no_arriving_request() -> None:
    scheduler, _ = scheduler_with(20, prepares_images=True)
    for name in "pq":
        scheduler.add_request(with_images(name, (name, 2, 4)))
    output = scheduler.schedule()
    assert (plan(output), [*output.images_ahead]) == ({"p": [2], "q": [2]}, names(("p", 2, 4), ("q", 2, 4)))
    assert scheduler.schedule().is_empty, "a further step asks, although an answer will come"
    scheduler.update_from_output(output, ModelOutput(1, []))
    asks = scheduler.schedule()
    assert (plan(asks), asks.is_empty, asks.images_ahead) == ({}, False, output.images_ahead)
    scheduler.add_request(make_group("text", 3))
    assert plan(scheduler.schedule()) == {"text": [3]}
    scheduler.update_from_output(asks, ModelOutput(2, [], prepared_items=names(("q", 2, 4))))
    output = scheduler.schedule()
    assert ("q" in plan(output), "p" in plan(output), [*output.images_ahead]) == (True, False, names(("p", 2, 4)))


def test_what_the_worker_has_prepared_for_an_ended_request_is_not_counted_on() -> None:
    scheduler, _ = scheduler_with(20, prepares_images=True)
    scheduler.add_request(with_images("ends", A))
    output = scheduler.schedule()
    scheduler.update_from_output(output, ModelOutput(1, [], prepared_items=names(A)))
    scheduler.finish_requests(["ends"], SequenceStatus.FINISHED_ABORTED)
    assert scheduler.schedule().finished
    scheduler.add_request(with_images("next", A))
    assert plan(scheduler.schedule()) == {"next": [2]}


def test_a_sequence_whose_first_token_needs_an_image_is_told_to_the_worker_and_later_requests_do_not_wait() -> None:
    scheduler, _ = scheduler_with(20, prepares_images=True)
    scheduler.add_request(with_images("first", ("a", 0, 4)))
    scheduler.add_request(make_group("text", 3))
    output = scheduler.schedule()
    assert (plan(output), [*output.images_ahead]) == ({"text": [3]}, names(("a", 0, 4)))
    assert [new.sequence.group.request_id for new in output.new_sequences] == ["first", "text"]
    answer = ModelOutput(1, [7], prepared_items=names(("a", 0, 4)))
    scheduler.update_from_output(output, answer)
    output = scheduler.schedule()
    assert (plan(output), output.items_to_encode) == ({"text": [1], "first": [20]}, names(("a", 0, 4)))
    assert not output.new_sequences


def test_a_worker_that_is_lost_while_it_prepares_an_image_counts_against_the_request() -> None:
    scheduler, _ = scheduler_with(20, prepares_images=True)
    scheduler.add_request(group := with_images("lost", ("a", 0, 4)))
    assert not scheduler.schedule().is_empty
    scheduler.release_all()
    assert group.suspicion is not None


def test_the_time_to_encode_an_image_does_not_count_as_a_worker_that_is_slow() -> None:
    scheduler, worker = scheduler_with(9)
    make_scheduler(scheduler.waiting)  # with one worker alone, no times are compared
    scheduler.add_request(with_images("slow", A))
    for now, speed in ((0.0, 1000), (60.0, None)):
        output = scheduler.schedule(now)
        scheduler.update_from_output(output, worker.execute(output), now + 50)
        assert speed in (None, scheduler.member.slowness.speed)
    assert scheduler.member.slowness.speed < 1000


def test_an_image_that_is_larger_than_the_cache_is_refused_in_a_sentence() -> None:
    scheduler, worker = scheduler_with(3)
    scheduler.add_request(group := with_images("large", A))
    scheduler.add_request(with_images("small", ("d", 3, 3)))
    assert step(scheduler, worker).ignored == [group]
    assert group.error == "an image of the request has 4 tokens; the worker's encoder cache has room for 3"
    run(scheduler, worker)
    plain, _ = scheduler_with(0)
    plain.add_request(group := with_images("any", A))
    assert plain.schedule().ignored == [group]


def test_where_image_tokens_attend_both_ways_a_chunk_ends_before_or_after_an_image_and_decodes_leave_room() -> None:
    """The image has more tokens than a long prompt's chunk, and as many as a step has beside three decodes."""
    sizes = {"max_num_batched_tokens": 10, "max_num_seqs": 4, "max_prefill_chunk": 3}
    scheduler, worker = scheduler_with(20, images_attend_both_ways=True, **sizes)
    for name in "abc":
        scheduler.add_request(make_group(name, 1, root=name.encode(), max_tokens=30))
    step(scheduler, worker)
    scheduler.add_request(with_images("seen", ("first", 1, 7), ("second", 9, 5)))
    decodes = {"a": [1], "b": [1], "c": [1]}
    steps = [plan(step(scheduler, worker)) for _ in range(5)]
    assert steps == [decodes | {"seen": [number]} for number in (1, 7, 7, 5, 1)]


def test_where_image_tokens_attend_both_ways_a_chunk_may_begin_inside_an_image_of_which_blocks_are_cached() -> None:
    scheduler, worker = scheduler_with(20, images_attend_both_ways=True)
    for name, planned in (("first", 20), ("again", 4)):
        scheduler.add_request(make_group(name, 20 if name == "first" else 16, items=(make_image("a", 2, 13),)))
        output = step(scheduler, worker)
        assert plan(output) == {name: [planned]}
        run(scheduler, worker)


def test_an_image_that_a_step_cannot_compute_whole_beside_decodes_is_refused_in_a_sentence() -> None:
    sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    scheduler, _ = scheduler_with(20, images_attend_both_ways=True, **sizes)
    scheduler.add_request(group := with_images("large", ("a", 2, 6)))
    assert scheduler.schedule().ignored == [group]
    room = "a step computes it whole, and has at most 5 beside other requests' tokens"
    assert group.error == f"an image of the request has 6 tokens; {room}"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 12), st.sampled_from(PreemptionMode))
def test_an_image_that_cannot_be_decoded_ends_its_requests_and_no_others(
    seed: int, max_in_flight: int, more_blocks: int, mode: PreemptionMode
) -> None:
    """Requests share prefixes and images. All steps in flight are answered after the failure was planned."""
    scheduler, worker = scheduler_with(
        9,
        budget=seed % 9,
        num_device_blocks=6 + more_blocks,
        num_host_blocks=more_blocks,
        preemption_mode=mode,
        max_num_batched_tokens=8 + seed % 20,
        prepares_images=seed % 2 == 1,
    )
    bad = ("bad", seed % 7, 1 + seed % 5)
    worker.encoder = FakeEncoder(scheduler.config, failing={make_image(*bad).digest})
    groups: list[SequenceGroup] = []
    for number in range(6):
        images = [("good", 12, 4)] * (number % 2) + [bad] * (number % 3 == 0)
        items = tuple(make_image(*image) for image in sorted(images, key=lambda image: image[1]))
        groups.append(make_group(str(number), 17, n=1 + number % 2, max_tokens=6, items=items))
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    arriving = [*groups]
    for now in range(500):
        if arriving and now % (1 + seed % 3) == 0:
            scheduler.add_request(arriving.pop(0))
        if not (scheduler.has_work or in_flight or arriving):
            break
        output = scheduler.schedule()
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            scheduler.update_from_output(*in_flight.pop(0))
        scheduler.blocks.check()
        scheduler.encoder_cache.check()
    for number, group in enumerate(groups):
        is_bad = number % 3 == 0
        assert (group.error == "the model could not read an image of the prompt") == is_bad
        for sequence in group.sequences:
            assert (sequence.status is SequenceStatus.FINISHED_FAILED) == is_bad
            if not is_bad:
                assert output_of(group, sequence.index) == reference_output(group, sequence.index, 64)
