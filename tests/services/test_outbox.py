"""What a front end is told comes in order, in messages of bounded size, and a step may wait for it."""

import asyncio
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.core import (
    PoolingParams,
    PoolingType,
    SamplingParams,
    Sequence,
    SequenceGroup,
    SequenceOutput,
    SequenceStatus,
)
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.engine.calls import calls
from scheduler_service.engine.calls.calls import MAX_LOGPROBS, MAX_ROWS, MAX_WAITING, Outbox


def sequence() -> Sequence:
    return SequenceGroup("a", array("I", [5]), SamplingParams(max_tokens=9)).sequences[0]


def pooled_sequence(dimensions: int, half: bool = False) -> Sequence:
    """For a vector for each token."""
    pooling = PoolingParams(type=PoolingType.ALL, dimensions=dimensions, half=half)
    return SequenceGroup("a", array("I", [5]), SamplingParams(max_tokens=1, pooling=pooling)).sequences[0]


def entry(width: int) -> TokenLogprobs:
    return TokenLogprobs(list(range(width)), [-1.0] * width, 1)


def take_all(outbox: Outbox) -> list[pb.AttachResponse]:
    messages = []
    while len(outbox):
        messages.append(outbox.take())
    return messages


@given(st.lists(st.sampled_from(["row", "event", "logprobs"]), max_size=60))
def test_rows_and_events_come_in_the_order_in_which_they_were_told(kinds: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "MAX_ROWS", 4)
        patch.setattr(calls, "MAX_LOGPROBS", 30)
        outbox, told = Outbox(), []
        for number, kind in enumerate(kinds):
            told.append((kind, number))
            if kind == "row":
                outbox.outputs.append(number)
                outbox.token_ids.append(number)
            elif kind == "event":
                outbox.tell(number, aborted=pb.Aborted())
            else:
                outbox.tell_gained(number, SequenceOutput(sequence(), 7, entry(4)))
        came: list[tuple[str, int]] = []
        for message in take_all(outbox):
            assert len(message.outputs) <= 4
            row = 0
            for event in message.events:
                came += [("row", output) for output in message.outputs[row : event.row]]
                row = event.row
                came.append(("logprobs" if event.HasField("gained") else "event", event.call))
            came += [("row", output) for output in message.outputs[row:]]
        assert came == told
        assert not outbox.has_some.is_set()


@given(st.integers(1, 3000), st.integers(1, 40), st.booleans())
def test_many_vectors_come_in_events_of_bounded_size(dimensions: int, num_vectors: int, half: bool) -> None:
    """Each says which tokens its vectors are of."""
    one = pooled_sequence(dimensions, half)
    pooling = one.sampling.pooling
    assert pooling is not None
    data = bytes(number % 251 for number in range(pooling.vector_bytes)) * num_vectors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "MAX_VECTOR_BYTES", 5000)
        outbox = Outbox()
        outbox.tell_gained(3, SequenceOutput(one, 0, prompt_start=8, vectors=data))
    events = [event for message in take_all(outbox) for event in message.events]
    start, found = 8, b""
    for event in events:
        assert (event.call, event.gained.prompt_start) == (3, start)
        assert len(event.gained.vectors) <= max(5000, pooling.vector_bytes)
        found += event.gained.vectors
        start += len(event.gained.vectors) // pooling.vector_bytes
    assert found == data
    assert [event.gained.HasField("token_id") for event in events] == [False] * (len(events) - 1) + [True]


def test_a_message_has_a_bounded_number_of_rows_and_of_log_probabilities() -> None:
    outbox = Outbox()
    outbox.outputs += range(3 * MAX_ROWS)
    outbox.token_ids += [7] * (3 * MAX_ROWS)
    assert [len(message.outputs) for message in take_all(outbox)] == [MAX_ROWS] * 3
    outbox.tell_gained(1, SequenceOutput(sequence(), 7, entry(21), [entry(21)] * 2048, 1))
    messages = take_all(outbox)
    gained = [event.gained for message in messages for event in message.events]
    assert max(sum(len(e.gained.prompt_logprobs.token_ids) for e in m.events) for m in messages) <= MAX_LOGPROBS
    assert sum(len(part.prompt_logprobs.ranks) for part in gained) == 2048
    starts = [1 + sum(len(part.prompt_logprobs.ranks) for part in gained[:number]) for number in range(len(gained))]
    assert [part.prompt_start for part in gained] == starts
    assert [part.HasField("token_id") for part in gained] == [False] * (len(gained) - 1) + [True]


def test_a_message_has_a_bounded_number_of_vectors() -> None:
    outbox = Outbox()
    for number in range(100):
        outbox.tell_gained(number, SequenceOutput(pooled_sequence(50_000), None, vectors=bytes(200_000)))
    messages = take_all(outbox)
    assert sum(len(message.events) for message in messages) == 100
    assert max(message.ByteSize() for message in messages) < 1 << 20


def test_a_status_is_that_of_the_moment_at_which_it_was_told() -> None:
    outbox, running = Outbox(), sequence()
    outbox.tell_gained(1, SequenceOutput(running, 7, entry(1)))
    running.status = SequenceStatus.FINISHED_STOPPED
    outbox.tell_gained(1, SequenceOutput(running, 8, entry(1)))
    statuses = [event.gained.status for message in take_all(outbox) for event in message.events]
    assert [bool(status) for status in statuses] == [False, True]


async def test_events_and_log_probabilities_count_as_rows_do() -> None:
    outbox = Outbox()
    while outbox.has_room:
        outbox.tell_gained(1, SequenceOutput(sequence(), 7, entry(21)))
    assert MAX_WAITING // 40 < len(outbox) < MAX_WAITING // 20
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    take_all(outbox)
    async with asyncio.timeout(30):
        await waiting


async def test_a_front_end_that_leaves_too_much_untaken_is_told_of() -> None:
    outbox = Outbox(most_bytes=1 << 20)
    while outbox.has_room:
        outbox.tell_gained(1, SequenceOutput(sequence(), 7, entry(21)))
    async with asyncio.timeout(30):
        await outbox.room()  # nothing takes anything
    assert outbox.is_overfull.is_set()


async def test_a_step_waits_for_a_front_end_that_takes_and_not_for_one_that_has_stopped() -> None:
    outbox = Outbox()
    outbox.outputs += [1] * (MAX_WAITING + 2 * MAX_ROWS)
    outbox.token_ids += [1] * (MAX_WAITING + 2 * MAX_ROWS)
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    outbox.take()
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.take()
    async with asyncio.timeout(30):
        await waiting  # there is room
        outbox.outputs += [1] * MAX_ROWS
        outbox.token_ids += [1] * MAX_ROWS
        await outbox.room()  # nothing was taken for a while
        stuck = asyncio.create_task(outbox.room())
        await asyncio.sleep(0)
        assert stuck.done()  # at once, from then on
    outbox.outputs += [1] * MAX_ROWS
    outbox.token_ids += [1] * MAX_ROWS
    outbox.take()
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()  # it takes again
    waiting.cancel()
