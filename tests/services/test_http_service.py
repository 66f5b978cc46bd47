"""A call of an HTTP request is a call of InferenceService in the same process, in step with its reader."""

import asyncio
from itertools import pairwise, product
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.chat.find_syntax import find_syntax
from scheduler_service.frontend.chat.parser import ChatParser
from scheduler_service.frontend.http.chats.chat_answers import ReasoningCount
from scheduler_service.frontend.http.openai.chat import ended
from scheduler_service.frontend.http.openai.chat_choice import ChatChoice
from scheduler_service.frontend.http.service import _streaming


class Method:
    """Sends numbers until it ends."""

    def __init__(self, ends_with: Exception | None = None) -> None:
        self.num_sent, self.has_ended = 0, False
        self._ends_with = ends_with

    async def __call__(self, request: int, context: Any) -> None:
        try:
            for number in range(request):
                self.num_sent += 1
                await context.write(number)
            if self._ends_with is not None:
                raise self._ends_with
        finally:
            self.has_ended = True


async def all_run() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_reader_that_is_slow_slows_its_call_and_one_that_leaves_ends_it() -> None:
    method = Method()
    async with _streaming(method, 100, ()) as messages:
        for number in range(3):
            assert await anext(messages) == number
            await all_run()
            assert method.num_sent <= number + 3
        assert not method.has_ended
    assert method.has_ended
    assert method.num_sent < 100


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RequestError(grpc.StatusCode.NOT_FOUND, "there is none"), grpc.StatusCode.NOT_FOUND, "there is none"),
        (ValueError("/inside"), grpc.StatusCode.INTERNAL, "internal error; the server's log has the details"),
    ],
)
async def test_an_error_comes_behind_all_messages_and_says_nothing_of_the_inside(
    error: Exception, code: grpc.StatusCode, words: str
) -> None:
    found = []

    async def read() -> None:
        async with _streaming(Method(error), 3, ()) as messages:
            async for number in messages:
                found.append(number)
                await all_run()

    with pytest.raises(RequestError) as raised:
        await read()
    assert (found, raised.value.code, str(raised.value)) == ([0, 1, 2], code, words)


def test_one_of_several_outputs_that_fails_says_why_and_the_others_go_on() -> None:
    error = pb.OutputError(code=grpc.StatusCode.INTERNAL.value[0], message="it broke")
    message = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_ERROR, error=error)
    assert ended(ChatChoice(0, "a"), message) == {"finish_reason": "error", "stop_reason": "it broke"}


def test_the_number_of_reasoning_tokens_does_not_depend_on_how_an_output_is_cut() -> None:
    syntax = find_syntax("<think></think>", None)
    assert syntax is not None
    for texts, close_id, expected in (
        (["<think>", "\n", "a", "b", "</think>", "c", "d"], 4, 5),
        (["<think>", "a", "b"], 9, 3),
        (["a", "b", "</think>", "c"], 2, 0),
        (["<think>", "</think>", "c", "d"], 1, 0),
    ):
        for is_cut in product((False, True), repeat=len(texts) - 1):
            parser, count = ChatParser(syntax, "", ()), ReasoningCount(close_id)
            borders = [0, *(place for place, cut in enumerate(is_cut, 1) if cut), len(texts)]
            deltas = [(range(*part), parser.feed("".join(texts[slice(*part)]))) for part in pairwise(borders)]
            assert sum(count.count(token_ids, events) for token_ids, events in deltas) == expected, (texts, borders)
