"""Random workloads in every mode, on a worker that checks every slot that it reads."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest
from fake_worker import FakeWorker, reference_beams, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_image, make_item, make_scheduler, output_of

from scheduler_service.core import (
    FairQueue,
    ModelOutput,
    PhaseRule,
    PoolingParams,
    PoolingType,
    PreemptionMode,
    PriorityQueue,
    PromptItem,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    WaitingQueue,
)

requests = st.tuples(
    st.integers(1, 40),  # prompt tokens
    st.integers(1, 3),  # n
    st.integers(1, 20),  # max tokens
    st.integers(0, 4),  # min tokens
    st.sets(st.integers(0, 49), max_size=3),  # end tokens
    st.integers(0, 12),  # arrives before this step
    st.one_of(st.none(), st.integers(0, 12)),  # is aborted before this step
    st.sampled_from([0, 0, 0, 1, 2, 3]),  # beams
    st.sampled_from([None, None, None, None, PoolingType.LAST, PoolingType.MEAN]),  # is pooled
    st.sampled_from([0, 0, 0, 1, 5, 10, 12]),  # tokens that its encoder reads
)


def items(content: str, length: int, kind: int) -> tuple[PromptItem, ...]:
    """Embeddings in the middle of a prompt, an image there, or one in two parts at its end."""
    size = max(1, length // 4)
    if kind == 1:
        return (make_item(content, length // 3, size),)
    if kind == 2 or size == length:
        return (make_image(f"{content} of {size}", length // 3, size),)
    return tuple(make_image(f"{content} of {size}", length - (2 - part) * size, size, part) for part in range(2))


@settings(deadline=None, max_examples=200)
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
    st.sampled_from([0, 1, 4, 9]),  # tokens of a prompt in a step at first
)
def test_whatever_happens_every_request_gets_its_own_output_and_leaves_nothing_behind(
    specs: SequenceOf[tuple[int, int, int, int, set[int], int, int | None, int, PoolingType | None, int]],
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
    max_prefill_chunk: int,
) -> None:
    sizes: dict[str, object] = {
        "num_host_blocks": num_host_blocks,
        "preemption_mode": mode,
        "prefix_caching": prefix_caching,
        "phase_rule": phase_rule,
        "delay_factor": 2.0 if phase_rule is PhaseRule.SEPARATE else 0.0,
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
        "max_prefill_chunk": max_prefill_chunk,
        "max_num_encoder_tokens": 11,
        "encoder_cache_size": 10 + more_tokens,
        "encoder_budget": max_prefill_chunk,
        "prepares_images": bool(more_tokens % 2),
        "images_attend_both_ways": bool(more_tokens % 3),
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
            adapter_id=["", "a", "b", "c"][i % 4],
            encoder=range(num_encoder_tokens),
            items=() if i % 4 == 0 or num_encoder_tokens else items(str(i // 4), length, i % 4),
            **(
                {"max_tokens": 1, "pooling": PoolingParams(type=pooled, dimensions=1)}
                if pooled
                else {
                    "n": n,
                    "max_tokens": max_tokens,
                    "min_tokens": min(min_tokens, max_tokens),
                    "eos_token_ids": frozenset(ends),
                    "beam_width": beam_width,
                }
            ),
        )
        for i, (length, n, max_tokens, min_tokens, ends, _, _, beam_width, pooled, num_encoder_tokens) in enumerate(
            specs
        )
    ]
    finished: dict[Sequence, int] = {}
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    for now in range(5_000):
        for group, (*_, arrival, abort, _, _, _) in zip(groups, specs, strict=True):
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
        scheduler.encoder_cache.check()
        assert scheduler.num_running_seqs == sum(group.num_seqs for group in scheduler.running)
        if phase_rule is PhaseRule.SEPARATE:
            new = {placement.group for placement in output.placements}  # that begin, or begin anew
            prompts = [s for s, n, samples in output.scheduled if n > 1 or not samples or s.group in new]
            decodes = [s for s, *_ in output.scheduled if s not in prompts and s.num_output_tokens]
            assert not (decodes and prompts)
        chunks = [scheduled for scheduled in output.scheduled if not scheduled.sequence.is_encoder]
        assert sum(chunk.num_tokens for chunk in chunks) <= sizes["max_num_batched_tokens"]
        assert output.num_tokens - sum(chunk.num_tokens for chunk in chunks) <= sizes["max_num_encoder_tokens"]
        assert len({group.adapter_id for group in scheduler.running} - {""}) <= max_loras
        assert len(chunks) <= sum(group.num_seqs for group in scheduler.running) <= max_num_seqs
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            for gained in scheduler.update_from_output(*in_flight.pop(0), now + 0.5):
                if gained.sequence.status.is_finished:
                    finished[gained.sequence] = finished.get(gained.sequence, 0) + 1
        scheduler.blocks.check()
        scheduler.encoder_cache.check()
        assert scheduler.num_running_seqs == sum(group.num_seqs for group in scheduler.running)
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
