"""Most of what a client is sent is plain: a token and its text. It has a fast path on every part of its way.

It is put into a message as a row and not as an event, brought to its output without a look at what else there might be,
and put on the stream by a method of its own. The client is sent the same as by the full paths.
"""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_validation import check, request

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.core import SequenceGroup, SequenceOutput, SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.engine.calls.calls import Call, Outbox
from scheduler_service.engine.engine import Engine
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output import streams
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.request_state import Gained, RequestState
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream, Turns
from scheduler_service.settings import SchedulerSettings
from scheduler_service.statistics.counts import RequestCounts

STOPPED, CAPPED = SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"n": 2, "include_stop_str_in_output": True, "skip_special_tokens": False},
    {"n": 2, "stop": ["ab", "c"]},
    {"stop": ["ba"], "min_tokens": 3, "include_stop_str_in_output": True},
    {"n": 2, "logprobs": 1},
    {"n": 2, "prompt_logprobs": 1},
    {"n": 1, "best_of": 3},
]
"""Of requests; the first three are plain."""
TOKENS = [67, 68, 69, 161, 249, 228]
"""Of the byte tokenizer: a, b, c, and the parts of a snowman."""


class Reader:
    """Asks a stream for one delta after the other, as far as it is let."""

    def __init__(self, stream: OutputStream) -> None:
        self.stream = stream
        self.deltas: list[OutputDelta] = []
        self._next = asyncio.ensure_future(anext(stream))

    async def read(self) -> None:
        """Take the next delta, if there is one."""
        await self.settle()
        if self._next.done():
            self.deltas.append(self._next.result())
            self._next = asyncio.ensure_future(anext(self.stream))
            await self.settle()

    async def rest(self) -> None:
        """Take deltas until every output has ended."""
        with suppress(StopAsyncIteration):
            while True:
                self.deltas.append(await self._next)
                self._next = asyncio.ensure_future(anext(self.stream))

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        self._next.cancel()
        await asyncio.gather(self._next, return_exceptions=True)
        self.stream.leave()


# ---- on the stream


TEXTS = st.sampled_from(["", "a", "bc", "\N{SNOWMAN}" * 9])
PUT = st.one_of(st.just("read"), st.just("end"), st.tuples(st.integers(0, 2), st.integers(0, 9), TEXTS))


@given(st.lists(PUT, max_size=40))
async def test_a_token_is_put_on_the_stream_as_a_delta_of_one_token_would_be(
    puts: list[Any],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "MAX_TOKENS", 4)
        patch.setattr(streams, "MAX_CHARACTERS", 8)
        plain, full = [Reader(OutputStream(100, Turns(), UnreadOutput(1 << 30))) for _ in range(2)]
        await plain.settle()
        for number, put in enumerate([*puts, "end", *["read"] * len(puts)]):
            if put == "read":
                await plain.read()
                await full.read()
            elif put == "end":  # of another output: what waits may be read now
                for reader in (plain, full):
                    reader.stream.put(OutputDelta(3, status=CAPPED, num_output_tokens=number))
            else:
                index, token_id, text = put
                plain.stream.put_token(index, token_id, text, number)
                full.stream.put(OutputDelta(index, text, [token_id], num_output_tokens=number))
            assert plain.deltas == full.deltas
            assert plain.stream.num_unread == full.stream.num_unread
        for reader in (plain, full):
            await reader.leave()


# ---- to an output


class Told:
    """What a trace was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def stands(self, standing: pb.Standing) -> None:
        self.told.append(standing)

    def gained_token(self, now: float) -> None:
        self.told.append(now)

    def end(self, at: float) -> None:
        self.told.append(("end", at))


def state_of(checked: GenerationRequest, model: ServedModel) -> RequestState:
    state = RequestState(checked, model.tokenizer, RequestCounts(), Turns(), UnreadOutput(1 << 30))
    state.trace = Told()
    state.times.arrived_at = 0.0
    return state


async def test_what_is_plain_is_known_from_the_request(byte_model: ServedModel) -> None:
    checked = [await check(request("hello", **options), byte_model) for options in (*OPTIONS, {"beam_width": 2})]
    assert [one.is_plain for one in checked] == [True] * 3 + [False] * 6
    groups = [SequenceGroup("a", one.prompt_token_ids, one.sampling) for one in checked]
    # The engine knows nothing of stop strings.
    assert [group.is_plain for group in groups] == [one.is_plain or bool(one.stop) for one in checked]


@settings(max_examples=100)
@given(
    st.sampled_from(OPTIONS),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(TOKENS), st.integers(0, 3)), max_size=40),
    st.sampled_from([None, STOPPED, CAPPED]),
)
async def test_a_token_comes_to_its_output_as_anything_else_that_it_gains(
    byte_model: ServedModel, options: dict[str, Any], tokens: list[tuple[int, int, int]], end: SequenceStatus | None
) -> None:
    checked = await check(request("hello", max_tokens=50, **options), byte_model)
    plain, full = [state_of(checked, byte_model) for _ in range(2)]
    readers = [Reader(state.stream) for state in (plain, full)]
    num_sequences = checked.sampling.n
    for now, (index, token_id, num_read) in enumerate(tokens, 1):
        index %= num_sequences
        assert plain.gain_token(index, token_id, now) == full.gain(Gained(index, token_id), now)
        if not num_read:
            for reader in readers:
                await reader.read()
    for index in range(num_sequences):
        for state in (plain, full):
            if end is not None:
                state.gain(Gained(index, TOKENS[0], end), 100.0)
        assert plain.num_output_tokens == full.num_output_tokens
    for state in (plain, full):
        state.abort()  # what has not ended
    for reader in readers:
        await reader.rest()
    assert readers[0].deltas == readers[1].deltas
    assert plain.metrics(200.0) == full.metrics(200.0)
    assert plain.counts.encode("x") == full.counts.encode("x")
    assert plain.trace.told == full.trace.told  # type: ignore[union-attr]


# ---- from the engine to the front end


class Wire:
    """Requests in the engine and in a front end, and what goes between the two."""

    def __init__(self, requests: list[GenerationRequest], model: ServedModel, *, is_full: bool) -> None:
        self.is_full, self.num_tokens = is_full, 0
        self.engine, self.outbox = Engine(SchedulerSettings(workers=["gone:1"], model="fake")), Outbox()
        self.engine.requests.outboxes.add(self.outbox)
        self.link = EngineLink("unix:/of-no-engine")
        self.link.requests.unread.most = 1 << 40
        self.states = [state_of(checked, model) for checked in requests]
        self.groups: list[SequenceGroup] = []
        self.num_rows = 0
        for number, state in enumerate(self.states, 1):
            self.link.requests.register(number, state)
            call = self.engine.requests.in_flight[str(number)] = Call(self.outbox, number, str(number))
            call.group = SequenceGroup(str(number), state.request.prompt_token_ids, state.request.sampling)
            call.first_output = state.first_output
            self.groups.append(call.group)
            for sequence in call.group.sequences:
                sequence.status = SequenceStatus.RUNNING
            if is_full:
                state._is_plain = False

    def publish(self, step: list[tuple[int, int, int, str]]) -> None:
        """What sequences gained in a step; one that has ended gains nothing."""
        gained: list[SequenceOutput] = []
        for number, index, token_id, how in step:
            group = self.groups[number % len(self.groups)]
            sequence, sampling = group.sequences[index % len(group.sequences)], group.sampling
            if sequence.status.is_finished:
                continue
            entry = TokenLogprobs([token_id, 7], [-1.0, -0.5], 2)
            logprobs = entry if sampling.logprobs is not None else None
            prompt_logprobs = None
            if how == "prompt":
                if sequence.sampling.prompt_logprobs is not None:
                    prompt_logprobs = [entry] * 2
                gained.append(SequenceOutput(sequence, None, None, prompt_logprobs, 1 if prompt_logprobs else 0))
                continue
            if how == "ends behind a guess":
                gained.append(SequenceOutput(sequence, token_id, logprobs, goes_on=True))
            sequence.status = {
                "goes on": SequenceStatus.RUNNING,
                "was swapped out": SequenceStatus.SWAPPED,
                "fails": SequenceStatus.FINISHED_FAILED,
                "stops": STOPPED,
            }.get(how, CAPPED)
            gained.append(SequenceOutput(sequence, None if how == "fails" else token_id, logprobs))
        if self.is_full:
            for output in gained:
                self.engine.requests.in_flight[output.sequence.group.request_id].tell_gained(output)
        else:
            self.engine.requests.publish(gained)
        self.num_tokens += sum(output.token_id is not None for output in gained)

    def deliver(self, now: float) -> None:
        while len(self.outbox):
            message = pb.AttachResponse.FromString(self.outbox.take().SerializeToString())
            self.num_rows += len(message.outputs)
            self.link.take(message, now)

    async def read(self) -> list[Any]:
        """What each client gets: of each output its text and the like, and how that ended."""
        got: list[Any] = []
        for state in self.states:
            outputs: dict[int, OutputDelta] = {}
            try:
                async for delta in state.stream:
                    if (before := outputs.setdefault(delta.index, delta)) is not delta:
                        before.merge(delta)
                got.append(outputs)
            except Exception as error:  # of a request whose only output failed
                got.append((outputs, str(error)))
            got.append((state.metrics(200.0), state.counts.encode("x"), state.trace.told))  # type: ignore[union-attr]
        got.append([(event.call, event.stop_output.index) for event in self.link.connection._events])
        return got

    async def close(self) -> None:
        await self.link.connection.close()
        await self.engine.workers.all[0].client.close()


HOW = ["goes on"] * 20 + ["prompt"] * 3 + ["was swapped out", "ends behind a guess", "fails", "stops", "is capped"]
GAIN = st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(TOKENS), st.sampled_from(HOW))


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=3),
    st.lists(st.tuples(st.lists(GAIN, max_size=8), st.booleans()), max_size=12),
)
async def test_a_row_brings_what_an_event_would(
    byte_model: ServedModel, options: list[dict[str, Any]], steps: list[tuple[list[tuple[int, int, int, str]], bool]]
) -> None:
    requests = [await check(request("hello", max_tokens=50, **one), byte_model) for one in options]
    rows, events = Wire(requests, byte_model, is_full=False), Wire(requests, byte_model, is_full=True)
    last = [(number, index, TOKENS[0], "is capped") for number in range(len(requests)) for index in range(3)]
    for now, (step, is_delivered) in enumerate([*steps, (last, True)], 1):
        for wire in (rows, events):
            wire.publish(step)
            if is_delivered:
                wire.deliver(now)
    async with asyncio.timeout(30):
        assert await rows.read() == await events.read()
    assert not events.num_rows
    assert rows.engine.requests.statistics.num_output_tokens == rows.num_tokens
    for wire in (rows, events):
        await wire.close()
