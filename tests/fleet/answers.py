"""The answer to a drawn request, and the comparison of two answers."""

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from drawn_requests import Asked

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.resumable import ResumableStream
from pagewire_client.retry import Backoff

PATIENCE_SECONDS = 390.0
"""Seconds of retries after the loss of a server: nearly a round of `differential.py`.

A queued request receives nothing while one disturbance, of up to 60 s, follows another.
"""

TOLERANCE = 1e-5


@dataclass
class Said:
    """One output."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    end: tuple[object, ...] = ()
    """Finish reason, stop reason, error, tokens of prompt and output; empty before the last message."""


@dataclass
class Answer:
    """Everything that one call received."""

    outputs: dict[int, Said] = field(default_factory=dict)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    vectors: dict[int, list[float]] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    has_left: bool = False
    """Whether the client left before the end."""

    def add(self, message: pb.GenerateResponse) -> None:
        output = self.outputs.setdefault(message.index, Said())
        assert not output.end, "a message after the last one"
        output.token_ids += message.token_ids
        output.text += message.text
        output.logprobs += message.logprobs
        self.prompt_logprobs += message.prompt_logprobs
        if message.finish_reason:
            usage, reason = message.usage, message.WhichOneof("stop_reason")
            output.end = (
                pb.FinishReason.Name(message.finish_reason),
                getattr(message, reason) if reason else None,
                (message.error.code, message.error.message),
                (usage.prompt_tokens, usage.output_tokens),
            )

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs.values())


class Breaking:
    """A call whose connection seems to break after some messages."""

    def __init__(self, call: Any, after: int) -> None:
        self.cancel, self.cancelled = call.cancel, call.cancelled
        self._call = call
        self._after = after

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        left = self._after
        async for message in self._call:
            yield message
            left -= 1
            if not left:
                self._call.cancel()
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the test broke the stream")


async def ask(stub: InferenceServiceStub, asked: Asked, *, is_disturbed: bool) -> Answer:
    """One call to its end or, if disturbed, with the breaks and leaves of `asked` and resumed after losses."""
    answer = Answer()
    backoff = Backoff(PATIENCE_SECONDS if is_disturbed else 0.0)
    try:
        if isinstance(asked.message, pb.EmbedRequest):
            await _embed(stub, asked.message, answer, backoff)
        else:
            await _generate(stub, asked, answer, backoff, is_disturbed=is_disturbed)
    except grpc.aio.AioRpcError as error:
        answer.error = error.code().name, str(error.details())
    return answer


async def _embed(stub: InferenceServiceStub, message: pb.EmbedRequest, answer: Answer, backoff: Backoff) -> None:
    while True:
        answer.vectors.clear()
        try:
            async for response in stub.Embed(message):
                numbers = struct.unpack(f"<{len(response.vectors) // 4}f", response.vectors)
                answer.vectors.setdefault(response.index, []).extend(numbers)
            return
        except grpc.aio.AioRpcError as error:
            pause = backoff.pause(error)
        await asyncio.sleep(pause)


async def _generate(
    stub: InferenceServiceStub, asked: Asked, answer: Answer, backoff: Backoff, *, is_disturbed: bool
) -> None:
    request = pb.GenerateRequest()
    request.CopyFrom(asked.message)  # which the stream changes
    request.request_id = uuid.uuid4().hex
    breaks = list(asked.breaks_after) if is_disturbed else []

    def start(request: pb.GenerateRequest, timeout: float | None, metadata: Any) -> Any:
        call = stub.Generate(request, timeout=timeout, metadata=metadata)
        return Breaking(call, breaks.pop(0)) if breaks else call

    async def explain(error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        return error

    stream = ResumableStream(start, request, timeout=None, backoff=backoff, explain=explain)
    num_messages = 0
    async with aclosing(stream.responses()) as responses:
        async for message in responses:
            answer.add(message)
            num_messages += 1
            if is_disturbed and num_messages == asked.leaves_after:
                answer.has_left = True
                return


def difference(found: Answer, alone: Answer) -> str:
    """The difference from the request alone, or ""."""
    if found.has_left or alone.error is not None:
        ways = [_begins(found.outputs.get(index, Said()), said) for index, said in alone.outputs.items()]
    else:
        ways = [_same(found.outputs.get(index, Said()), said) for index, said in alone.outputs.items()]
        ways.append("" if found.outputs.keys() == alone.outputs.keys() else "other outputs")
        ways.append(_close(found.prompt_logprobs, alone.prompt_logprobs, "prompt_logprobs"))
        ways.append(_vectors_close(found.vectors, alone.vectors))
    if not found.has_left and found.error != alone.error:
        ways.append(f"error {found.error}, alone {alone.error}")
    return "; ".join(filter(None, ways))


def _begins(found: Said, alone: Said) -> str:
    """Compare what had come before a client left or a call failed. Messages are merged by time, so either may have
    more.
    """
    shorter, longer = sorted((found.token_ids, alone.token_ids), key=len)
    if longer[: len(shorter)] != shorter:
        return _where(found.token_ids, alone.token_ids)
    few, more = sorted((found.text, alone.text), key=len)
    return "" if more.startswith(few) else f"text {found.text!r}, alone {alone.text!r}"


def _same(found: Said, alone: Said) -> str:
    if found.token_ids != alone.token_ids:
        return f"{_where(found.token_ids, alone.token_ids)} ({found.end}, alone {alone.end})"
    if (found.text, found.end) != (alone.text, alone.end):
        return f"{(found.text, found.end)}, alone {(alone.text, alone.end)}"
    return _close(found.logprobs, alone.logprobs, "logprobs")


def _where(found: Sequence[int], alone: Sequence[int]) -> str:
    pairs = zip(found, alone, strict=False)
    place = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(found), len(alone)))
    return (
        f"token {place}: {list(found[place : place + 3])} of {len(found)}, "
        f"alone {list(alone[place : place + 3])} of {len(alone)}"
    )


def _close(found: Sequence[pb.TokenLogprobs], alone: Sequence[pb.TokenLogprobs], name: str) -> str:
    if len(found) != len(alone):
        return f"{len(found)} {name}, alone {len(alone)}"
    for place, (one, other) in enumerate(zip(found, alone, strict=True)):
        for mine, theirs in zip([one.chosen, *one.top], [other.chosen, *other.top], strict=True):
            is_close = abs(mine.logprob - theirs.logprob) <= TOLERANCE
            if (mine.token_id, mine.rank) != (theirs.token_id, theirs.rank) or not is_close:
                return f"{name}[{place}]: {mine}, alone {theirs}".replace("\n", " ")
    return ""


def _vectors_close(found: dict[int, list[float]], alone: dict[int, list[float]]) -> str:
    if {index: len(vector) for index, vector in found.items()} != {n: len(vector) for n, vector in alone.items()}:
        return "vectors of other lengths"
    distance: Callable[[int], float] = lambda index: max(  # noqa: E731
        (abs(one - other) for one, other in zip(found[index], alone[index], strict=True)), default=0.0
    )
    farthest = max(map(distance, alone), default=0.0)
    return f"a vector's number differs by {farthest:g}" if not farthest <= TOLERANCE else ""
