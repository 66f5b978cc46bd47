"""The deltas of a repeated stream get the borders that the broken stream had, however they are divided anew."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.frontend.http.resuming.event_ids import Position
from scheduler_service.frontend.http.resuming.replay import Replay
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream, Turns
from scheduler_service.wire.sampling import RequestSampling

NUM_OUTPUTS, NUM_TRIALS = 3, 300


def outputs_of(draw: random.Random, model: ServedModel) -> list[list[OutputDelta]]:
    """Deltas of a token each. Characters of several bytes come with their last token."""
    request = request_of()
    outputs = []
    for index in range(NUM_OUTPUTS):
        text = request.text(model.tokenizer)
        tokens = [draw.choice((73, 74, 198, 131)) for _ in range(draw.randint(1, 20))]
        outputs.append([OutputDelta(index, text.step(token)[0], [token], num_output_tokens=1) for token in tokens])
        outputs[-1][-1].status = SequenceStatus.FINISHED_STOPPED
    return outputs


def request_of() -> GenerationRequest:
    return GenerationRequest(
        request_id="a", prompt_token_ids=[5], sampling=RequestSampling(n=NUM_OUTPUTS, max_tokens=20)
    )


def merged(draw: random.Random, outputs: list[list[OutputDelta]]) -> list[OutputDelta]:
    """The deltas of all outputs, merged and interleaved at random."""
    left, found = [list(output) for output in outputs], list[OutputDelta]()
    while any(left):
        output = draw.choice([output for output in left if output])
        delta = OutputDelta(output[0].index)
        for _ in range(draw.randint(1, 6)):
            if output:
                delta.merge(output.pop(0))
        found.append(delta)
    return found


async def test_one_delta_is_that_of_the_last_event_and_only_new_tokens_follow(byte_model: ServedModel) -> None:
    draw, unread = random.Random(1), UnreadOutput(0)
    for _ in range(NUM_TRIALS):
        outputs = outputs_of(draw, byte_model)
        broken = merged(draw, outputs)
        last = draw.randrange(len(broken))
        before = [sum(len(delta.token_ids) for delta in broken[:last] if delta.index == i) for i in range(NUM_OUTPUTS)]
        position = Position(tuple(before), broken[last].index, len(broken[last].token_ids), 0, 0, 0)
        stream = OutputStream(NUM_OUTPUTS, Turns(), unread)
        state: Any = SimpleNamespace(request=request_of(), stream=stream)
        replay = Replay(state, byte_model, position)
        found = [part for delta in merged(draw, outputs) for part in replay.arrange(delta)]
        counts = [0] * NUM_OUTPUTS
        for same in found:
            if counts == before and (same.index, len(same.token_ids)) == (position.output, position.num_new):
                break
            counts[same.index] += len(same.token_ids)
        expected = broken[last]
        assert (same.text, same.token_ids, same.status) == (expected.text, expected.token_ids, expected.status)
        assert said_by(found) == said_by(broken)
        assert unread.num_bytes == 0


def said_by(deltas: list[OutputDelta]) -> list[tuple[str, list[int], SequenceStatus | None]]:
    sums = [OutputDelta(index) for index in range(NUM_OUTPUTS)]
    for delta in deltas:
        sums[delta.index].merge(delta)
    return [(total.text, total.token_ids, total.status) for total in sums]


async def test_an_output_that_ends_before_the_last_event_is_an_error(byte_model: ServedModel) -> None:
    stream = OutputStream(NUM_OUTPUTS, Turns(), UnreadOutput(0))
    state: Any = SimpleNamespace(request=request_of(), stream=stream)
    for position in (Position((2, 0, 0), 1, 1, 0, 0, 0), Position((0, 0, 0), 0, 2, 0, 0, 0)):
        replay = Replay(state, byte_model, position)
        ended = OutputDelta(0, "g", [73], status=SequenceStatus.FINISHED_STOPPED)
        with pytest.raises(RequestError, match="the server generates other tokens"):
            list(replay.arrange(ended))
