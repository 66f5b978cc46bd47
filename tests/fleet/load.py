"""Streams of every kind on a disturbed fleet, compared with an undisturbed worker's tokens."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jsonschema

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, SamplingParams

SCHEMA = """{
    "type": "object", "required": ["color", "size"], "additionalProperties": false,
    "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 10, "maximum": 9999}}
}"""
CHOICES = ("a long answer, in which workers are lost", "another one, of which the same is true")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.9, "seed": 2, "n": 2, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.2, "seed": 3, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "seed": 4, "n": 1, "best_of": 3},
    {"beam_width": 3, "n": 2},
    {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 6, "regex": "([a-z]{1,9} ){1,40}", "ignore_eos": False},
    {"temperature": 1.0, "seed": 7, "json_schema": SCHEMA, "bad_words": [" ", "\n", "\r", "\t"], "ignore_eos": False},
    {"temperature": 0.5, "seed": 8, "choice": pb.Choice(options=CHOICES), "ignore_eos": False},
    {"temperature": 0.0, "grammar": 'root ::= sum\nsum ::= num ("+" num){2}\nnum ::= [0-9]{9,15}', "ignore_eos": False},
)


@dataclass(frozen=True)
class Request:
    """The request of one stream."""

    prompt: str
    sampling: pb.SamplingParams


def make_requests(count: int, scale: float = 1.0) -> list[Request]:
    """Greedy and seeded, several outputs and beams, prompts of 9 to 200 tokens; outputs of 40 to 180 tokens times
    `scale`.
    """
    return [
        Request(
            f"Stream {number}: " + "of many a word " * (number % 13),
            SamplingParams(
                max_tokens=int(scale * (40 + 37 * number % 140)),
                **{"ignore_eos": True} | SAMPLINGS[number % len(SAMPLINGS)],
            ),
        )
        for number in range(count)
    ]


@dataclass
class Output:
    """The contents of one output's messages."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[pb.FinishReason] = field(default_factory=list)
    num_after_end: int = 0
    """Messages after the one that ended the output."""


@dataclass
class Outcome:
    """The outputs of one stream that ended without an error."""

    outputs: dict[int, Output] = field(default_factory=dict)

    def add(self, message: pb.GenerateResponse) -> None:
        output = self.outputs.setdefault(message.index, Output())
        output.num_after_end += bool(output.ends)
        output.token_ids += message.token_ids
        output.text += message.text
        if message.finish_reason:
            output.ends.append(message.finish_reason)
            assert message.usage.output_tokens == len(output.token_ids)

    def check(self, request: Request) -> None:
        """Every output of the request ended exactly once, by its last message."""
        assert sorted(self.outputs) == list(range(request.sampling.n or 1)), request
        for output in self.outputs.values():
            assert len(output.ends) == 1, (request, output)
            assert output.num_after_end == 0, (request, output)
            if output.ends == [pb.FINISH_REASON_STOP]:
                check_form(request.sampling, output.text)


def check_form(sampling: pb.SamplingParams, text: str) -> None:
    """Raises unless a text that ended by itself has the required form."""
    match sampling.WhichOneof("constraint"):
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(sampling.json_schema))
        case "regex":
            assert re.fullmatch(sampling.regex, text)
        case "choice":
            assert text in sampling.choice.options
        case "grammar":
            assert re.fullmatch(r"\d{9,15}(\+\d{9,15}){2}", text)


class Load:
    """One stream for each request, repeated until the block is left; then the last ones end.

    Every stream must equal `expected`. Leaving the block raises any stream's error.
    """

    def __init__(self, client: Client, requests: Sequence[Request], expected: Mapping[str, Outcome]) -> None:
        self.num_completed = 0
        self.num_tokens = 0
        self.num_messages = 0
        """Messages with tokens."""
        self._client = client
        self.requests = requests
        self._expected = expected
        self._is_over = False
        self._gained = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_up(request)) for request in self.requests]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over = True
        try:
            if kind is None:
                async with asyncio.timeout(240):
                    await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def gain(self, num_tokens: int, timeout: float = 120.0) -> None:
        """Wait for more tokens. Raises a stream's error."""
        goal = self.num_tokens + num_tokens
        async with asyncio.timeout(timeout), self._gained:
            while self.num_tokens < goal:
                self.check()
                await self._gained.wait()

    def check(self) -> None:
        """Raises a stream's error."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def reach(self, is_enough: Callable[[float, float], bool], num_tokens: int) -> tuple[float, float]:
        """`rates` that are enough, or the last of five: a slow fleet slows all, other programs only one or two."""
        for _ in range(5):
            found = await self.rates(num_tokens)
            if is_enough(*found):
                break
        return found

    async def rates(self, num_tokens: int) -> tuple[float, float]:
        """Tokens a second, over at least `num_tokens`, and messages a second."""
        began, tokens, messages = time.monotonic(), self.num_tokens, self.num_messages
        await self.gain(num_tokens)
        seconds = time.monotonic() - began
        return (self.num_tokens - tokens) / seconds, (self.num_messages - messages) / seconds

    async def _keep_up(self, request: Request) -> None:
        try:
            while not self._is_over:
                outcome = Outcome()
                async for message in self._client.generate(request.prompt, request.sampling):
                    outcome.add(message)
                    self.num_tokens += len(message.token_ids)
                    self.num_messages += bool(message.token_ids)
                    async with self._gained:
                        self._gained.notify_all()
                outcome.check(request)
                assert outcome == self._expected[request.prompt], f"not what an undisturbed run gave: {request}"
                self.num_completed += 1
        except BaseException:
            self._is_over = True
            async with self._gained:
                self._gained.notify_all()
            raise


async def run_once(client: Client, requests: Sequence[Request]) -> dict[str, Outcome]:
    """The outcome of every request, by prompt; all run at once."""

    async def one(request: Request) -> Outcome:
        outcome = Outcome()
        async for message in client.generate(request.prompt, request.sampling):
            outcome.add(message)
        outcome.check(request)
        return outcome

    outcomes = await asyncio.gather(*map(one, requests))
    return {request.prompt: outcome for request, outcome in zip(requests, outcomes, strict=True)}
