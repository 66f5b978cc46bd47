"""No message outgrows a client's default limit, and a stream may break behind each piece of a large one."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_resumption import Stream, check
from test_validation import request

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.engine_service_pb2 import Hypothesis
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output import streams, whole_output
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.request_state import Gained, RequestState
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream, Turns
from scheduler_service.frontend.servicer import encode_delta
from scheduler_service.statistics.counts import RequestCounts

LARGEST = 300 << 10
LARGE_ID = 2**28 - 1
ENDED = SequenceStatus.FINISHED_LENGTH_CAPPED


def entry(token_id: int, width: int) -> TokenLogprobs:
    return TokenLogprobs([token_id, *range(LARGE_ID - width + 1, LARGE_ID)], [-1.0] * width, LARGE_ID)


async def begin(message: pb.GenerateRequest, model: ServedModel) -> RequestState:
    return RequestState(await check(message, model), model.tokenizer, RequestCounts(), Turns(), UnreadOutput(1 << 30))


async def read(state: RequestState) -> list[pb.GenerateResponse]:
    messages = [encode_delta(state, delta) async for delta in state.stream]
    for message in messages:
        message.seed = state.request.sampling.seed
    assert max(map(pb.GenerateResponse.ByteSize, messages)) <= LARGEST
    return messages


async def test_what_a_slow_reader_left_comes_in_messages_of_bounded_size(byte_model: ServedModel) -> None:
    """Texts of four bytes a character, the largest token ids and all the log-probabilities that there can be."""
    state = await begin(request(n=2), byte_model)
    stream, tokens = state.stream, range(LARGE_ID - 8_000, LARGE_ID)
    stream.put_prompt_logprobs([entry(token, 21) for token in tokens])
    for count, token in enumerate(tokens, 1):
        stream.put(
            OutputDelta(0, "\N{GRINNING FACE}" * (token % 90), [token], [entry(token, 21)], num_output_tokens=count)
        )
        stream.put_token(1, token, "\N{GRINNING FACE}" * (token % 90), count)
    for index in range(2):
        stream.put(OutputDelta(index, "end", status=ENDED, num_output_tokens=len(tokens)))
    received = Stream()
    for message in await read(state):
        received.put(message)
        assert not (message.text and not message.token_ids and not message.finish_reason)
    for index in range(2):
        output = received.outputs[index]
        assert output.token_ids == list(tokens)
        assert output.text == "".join("\N{GRINNING FACE}" * (token % 90) for token in tokens) + "end"
        assert output.last == (pb.FINISH_REASON_LENGTH, None, 5, len(tokens))
    assert [entry.chosen.token_id for entry in received.outputs[0].logprobs] == list(tokens)
    assert [entry.chosen.token_id for entry in received.prompt_logprobs] == list(tokens)


async def test_a_whole_output_comes_in_messages_of_bounded_size(byte_model: ServedModel) -> None:
    state = await begin(request(best_of=2, logprobs=20, prompt_logprobs=20), byte_model)
    entries = [entry(5, 21)] * 4
    for index in range(2):
        for count in range(1, 8_001):
            status = ENDED if count == 8_000 else None
            state.gain(Gained(index, 70, status, None, entry(70, 21), entries, 1), 0.0)
            entries = []
    received = Stream()
    for message in await read(state):
        received.put(message)
    assert received.outputs[0].last == (pb.FINISH_REASON_LENGTH, None, 5, 8_000)
    assert len(received.outputs[0].text) == 8_000
    assert len(received.outputs[0].logprobs) == 8_000
    assert len(received.prompt_logprobs) == 4


# ---- broken behind every message


def best_of(state: RequestState, outputs: list[list[int]]) -> None:
    for index, token_ids in enumerate(outputs):
        for count, token_id in enumerate(token_ids, 1):
            status = ENDED if count == len(token_ids) else None
            state.gain(Gained(index, token_id, status, logprobs=entry(token_id, 1)), 0.0)


def beams(state: RequestState, outputs: list[list[int]]) -> None:
    state.gain_hypotheses([Hypothesis(token_ids=token_ids) for token_ids in outputs], 0.0)


SEARCHES = {"best of": ({"best_of": 4, "logprobs": 0}, best_of), "beams": ({"beam_width": 4}, beams)}
TEXTS = ["a b\N{GRINNING FACE}c" * 5, "x\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{SNOWMAN}" * 7, "not among the best"]


@pytest.fixture
def of_three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_TOKENS", 3)
    monkeypatch.setattr(whole_output, "MAX_TOKENS", 3)


@pytest.mark.usefixtures("of_three_tokens")
@pytest.mark.parametrize(("sampling", "search"), SEARCHES.values(), ids=SEARCHES)
async def test_a_whole_output_goes_on_behind_each_of_its_messages(
    sampling: dict[str, Any], search: Callable[[RequestState, list[list[int]]], None], byte_model: ServedModel
) -> None:
    assert byte_model.tokenizer is not None
    outputs = [await byte_model.tokenizer.encode(text) for text in TEXTS]

    async def run(message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        state = await begin(message, byte_model)
        search(state, outputs)
        return await read(state)

    message = request(n=3, max_tokens=90, **sampling)
    messages = await run(message)
    assert len(messages) > 15
    whole = Stream()
    for response in messages:
        whole.put(response)
    assert {output.text for output in whole.outputs.values()} == set(TEXTS[:3])
    for num_received in range(1, len(messages)):
        broken = Stream()
        for response in messages[:num_received]:
            broken.put(response)
        again = pb.GenerateRequest(resume=broken.resume)
        again.MergeFrom(message)
        for response in await run(again):
            broken.put(response)
        broken.assert_like(whole)


@pytest.mark.parametrize(("sampling", "search"), SEARCHES.values(), ids=SEARCHES)
async def test_a_whole_output_that_comes_out_otherwise_is_not_mixed_with_what_came(
    sampling: dict[str, Any], search: Callable[[RequestState, list[list[int]]], None], byte_model: ServedModel
) -> None:
    message = request(max_tokens=50, **sampling)
    message.resume.CopyFrom(pb.ResumeState(seed=0, outputs=[pb.ResumedOutput(index=0, token_ids=[70, 71])]))
    state = await begin(message, byte_model)
    search(state, [[70], [71, 72], [73] * 9, [74]])
    with pytest.raises(RequestError, match="resume has 2 tokens of output 0, but") as error:
        await read(state)
    assert error.value.code is grpc.StatusCode.FAILED_PRECONDITION


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 3)), max_size=60))
async def test_however_deltas_come_none_is_lost_and_every_text_stays_with_its_tokens(
    puts: list[tuple[int, int, int]],
) -> None:
    stream = OutputStream(3, Turns(), UnreadOutput(1 << 30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "MAX_TOKENS", 3)
        patch.setattr(streams, "MAX_CHARACTERS", 50)
        patch.setattr(streams, "MAX_LOGPROBS", 4)
        for token, (index, length, width) in enumerate(puts):
            text = f"{token}:{'x' * length} "
            if width:
                stream.put(OutputDelta(index, text, [token], [entry(token, width)], num_output_tokens=token))
            else:
                stream.put_token(index, token, text, token)
        for index in range(3):
            stream.put(OutputDelta(index, status=ENDED))
        deltas = [delta async for delta in stream]
    received: dict[int, list[int]] = {index: [] for index in range(3)}
    for delta in deltas:
        received[delta.index] += delta.token_ids
        assert [int(word.split(":")[0]) for word in delta.text.split()] == delta.token_ids
        assert len(delta.token_ids) <= 3
        assert len(delta.text) < 50 + 50
    assert received == {i: [token for token, put in enumerate(puts) if put[0] == i] for i in range(3)}
    assert sorted(delta.index for delta in deltas if delta.status is not None) == [0, 1, 2]
