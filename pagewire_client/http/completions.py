"""OpenAI's /v1/completions: one prompt or a list of prompts, as texts or token ids, with log-probabilities and `echo`.

On this route the gateway supports no token ids, no lists and no log-probabilities.
"""

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.http.call import Call, answer_in_parts, each_text, end, write
from pagewire_client.http.completion_fields import CompletionFields, sampling_params
from pagewire_client.http.errors import invalid, refused_by

MAX_PROMPTS = 256
MAX_PARAMETER_BYTES = 4 << 20
"""Maximum size in bytes of the sampling parameters, summed over the prompts of a request. Each prompt has a copy of the
parameters.
"""
TOKEN_BYTES = 40
LOGPROB_BYTES = 100
"""Approximate bytes of memory for each log-probability of an answer."""
POSITIONS_A_TURN = 64
_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


@dataclass(slots=True)
class _Choice:
    """The generated part of one output of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0
    """Number of characters of the output before the tokens of the current gRPC message."""

    def add(self, message: pb.GenerateResponse) -> None:
        self.text += message.text
        self.token_ids += message.token_ids
        self.logprobs += message.logprobs
        if message.finish_reason:
            self.reason = _REASONS[message.finish_reason]
            named = message.WhichOneof("stop_reason")
            self.stop_reason = getattr(message, named) if named else message.error.message or None


@dataclass(slots=True)
class _Prompt:
    """One prompt of a call, and its outputs so far."""

    asked: pb.GenerateRequest
    text: str
    choices: list[_Choice]
    echo: list[pb.TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_output: int = 0


async def complete(call: Call) -> web.StreamResponse:
    return await _Completions(call, await call.fields(CompletionFields)).answer()


class _Completions:
    """One call of /v1/completions."""

    def __init__(self, call: Call, fields: CompletionFields) -> None:
        self._call, self._fields = call, fields
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self._id, "object": "text_completion", "created": int(time.time())}
        self._head["model"] = fields.model or call.model
        self._num_choices = fields.n or 1
        self._prompts: list[_Prompt] = []
        self._response: web.StreamResponse | None = None
        self._beginning = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._streams: list[Any] = []

    async def answer(self) -> web.StreamResponse:
        fields = self._fields
        if fields.stream and fields.echo and (fields.logprobs is not None or fields.max_tokens == 0):
            raise invalid("echo with logprobs, or with max_tokens 0, cannot be streamed")
        sampling = sampling_params(fields)
        given = each_text(fields.prompt)
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise invalid(f"prompt has {len(given)} entries; it must have 1 to {MAX_PROMPTS}")
        num_bytes = len(given) * sampling.ByteSize()
        if num_bytes > MAX_PARAMETER_BYTES:
            raise invalid(f"the parameters of all prompts have {num_bytes} bytes; they may have {MAX_PARAMETER_BYTES}")
        self._call.held.take(num_bytes)
        # An echo requires further scheduler calls for each prompt, with this process's key. A client without a valid
        # key must not cause scheduler calls, so the key is checked before an echo.
        if fields.echo:
            await self._call.stub.GetModel(pb.GetModelRequest(), metadata=self._call.metadata)
        for one in given:
            self._prompts.append(await self._prepare(one, sampling))
            await asyncio.sleep(0)  # lets other tasks run
        if fields.stream:
            return await self._stream()
        await self._follow_all(self._take)
        for prompt in self._prompts:
            await self._learn(prompt.echo)
            for choice in prompt.choices:
                await self._learn(choice.logprobs, choice.token_ids)
            if fields.logprobs is not None:
                await self._learn([], prompt.asked.token_ids.ids)
        whole = json.dumps(self._head | {"usage": self._usage()}).encode()
        return await answer_in_parts(self._call.request, whole, b"choices", self._finished())

    async def _prepare(self, given: str | list[int], sampling: pb.SamplingParams) -> _Prompt:
        """Tokenize a prompt and look up token texts. These scheduler calls use this process's API key, so they do not
        count towards the client's quota.
        """
        call, fields = self._call, self._fields
        asked = pb.GenerateRequest(
            request_id=f"{self._id}-{len(self._prompts)}",
            sampling=sampling,
            priority=fields.priority,
            lora_name=call.adapter(fields.model),
        )
        text = ""
        if isinstance(given, str):
            asked.text = text = given
            if fields.echo and fields.logprobs is not None:  # the answer needs each echoed token's text
                found = await call.stub.Tokenize(pb.TokenizeRequest(text=given), metadata=call.own_metadata)
                asked.token_ids.ids.extend(found.token_ids)
        else:
            asked.token_ids.ids.extend(given)
            if fields.echo:
                shown = pb.DetokenizeRequest(token_ids=given, skip_special_tokens=False)
                text = (await call.stub.Detokenize(shown, metadata=call.own_metadata)).text
                call.held.take(len(text))
        return _Prompt(asked, text, [_Choice() for _ in range(self._num_choices)])

    async def _follow_all(self, take: Callable[[int, pb.GenerateResponse], Awaitable[None]]) -> None:
        """Read the streams of all prompts of the call.

        Raises the grpc.aio.AioRpcError of the first refused prompt. If a prompt is refused, the other streams end too,
        but not in the middle of an event.
        """
        tasks = [asyncio.create_task(self._follow(number, take)) for number in range(len(self._prompts))]
        try:
            await asyncio.gather(*tasks)
        except grpc.aio.AioRpcError:
            for stream in self._streams:
                stream.cancel()
            await asyncio.wait(tasks)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _follow(self, number: int, take: Callable[[int, pb.GenerateResponse], Awaitable[None]]) -> None:
        prompt = self._prompts[number]
        stream = self._call.stub.Generate(prompt.asked, metadata=self._call.metadata)
        self._streams.append(stream)
        try:
            async for message in stream:
                prompt.echo += message.prompt_logprobs
                if message.HasField("usage"):
                    prompt.num_tokens = message.usage.prompt_tokens
                    prompt.num_cached = message.usage.cached_tokens
                    prompt.num_output += message.usage.output_tokens
                await take(number, message)
        finally:
            stream.cancel()

    # ---- whole answers

    async def _take(self, number: int, message: pb.GenerateResponse) -> None:
        num_logprobs = sum(1 + len(one.top) for one in (*message.logprobs, *message.prompt_logprobs))
        self._call.held.take(len(message.text) + TOKEN_BYTES * len(message.token_ids) + LOGPROB_BYTES * num_logprobs)
        self._prompts[number].choices[message.index].add(message)

    async def _finished(self) -> AsyncIterator[bytes]:
        """Yield each choice immediately before it is sent. The echoed prompt and its log-probabilities are stored once
        for all choices.
        """
        for number, prompt in enumerate(self._prompts):
            for place, choice in enumerate(prompt.choices):
                token_ids: Sequence[int] = choice.token_ids
                logprobs: Sequence[pb.TokenLogprobs] = choice.logprobs
                if self._fields.max_tokens == 0:
                    choice.text, token_ids, logprobs, choice.reason, choice.stop_reason = "", [], [], "length", None
                if self._fields.echo:
                    choice = dataclasses.replace(choice, text=prompt.text + choice.text)
                    if self._fields.logprobs is not None:
                        token_ids = [*prompt.asked.token_ids.ids, *token_ids]
                        logprobs = [pb.TokenLogprobs(), *prompt.echo, *logprobs]
                yield (await self._shown(number, place, choice, token_ids, logprobs)).encode()

    # ---- streams

    async def _stream(self) -> web.StreamResponse:
        """Stream the choices as events. If a prompt fails after the first message of the stream, the error becomes the
        stream's last event.
        """
        try:
            await self._follow_all(self._write)
        except grpc.aio.AioRpcError as error:
            if self._response is None:
                raise
            await self._send(json.dumps(refused_by(error).body))
        response = await self._begun()
        if self._fields.stream_options and self._fields.stream_options.include_usage:
            await self._send(json.dumps(self._head | {"choices": [], "usage": self._usage()}))
        await self._send("[DONE]")
        await end(response)
        return response

    async def _write(self, number: int, message: pb.GenerateResponse) -> None:
        await self._begun()
        choice = self._prompts[number].choices[message.index]
        gained = _Choice(offset=choice.offset)
        gained.add(message)
        await self._learn(gained.logprobs, gained.token_ids)
        shown = await self._shown(number, message.index, gained, gained.token_ids, gained.logprobs)
        choice.offset = gained.offset
        await self._send_choice(shown)

    async def _begun(self) -> web.StreamResponse:
        async with self._beginning:
            if self._response is None:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
                await response.prepare(self._call.request)
                self._response = response
                for number, prompt in enumerate(self._prompts if self._fields.echo else ()):
                    for place in range(self._num_choices):
                        await self._send_choice(await self._shown(number, place, _Choice(prompt.text), [], []))
            return self._response

    async def _send_choice(self, shown: str) -> None:
        head = json.dumps(self._head).removesuffix("}")
        await self._send(f'{head}, "choices": [{shown}]}}')

    async def _send(self, event: str) -> None:
        assert self._response is not None
        async with self._sending:  # a large event takes several writes; the lock keeps events apart
            await write(self._response, f"data: {event}\n\n".encode())

    # ---- for whole answers and for streams

    async def _shown(
        self, number: int, place: int, choice: _Choice, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
    ) -> str:
        """A choice as JSON."""
        shown = {
            "index": number * self._num_choices + place,
            "text": choice.text,
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_reason,
        }
        found = await self._shown_logprobs(choice, token_ids, logprobs)
        return f'{json.dumps(shown).removesuffix("}")}, "logprobs": {found}}}'

    async def _learn(self, logprobs: Sequence[pb.TokenLogprobs], token_ids: Sequence[int] = ()) -> None:
        if self._fields.logprobs is not None:
            for start in range(0, max(len(token_ids), len(logprobs)), POSITIONS_A_TURN):
                stop = start + POSITIONS_A_TURN
                named = {*token_ids[start:stop]}
                for position in logprobs[start:stop]:
                    named.update(one.token_id for one in (position.chosen, *position.top))
                await self._call.texts.learn(self._call.stub, self._call.own_metadata, named)
                await asyncio.sleep(0)  # lets other tasks run

    async def _shown_logprobs(
        self, choice: _Choice, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
    ) -> str:
        """The log-probabilities as JSON, or null if none were requested. If several tokens have the same text, only the
        likeliest token is kept.
        """
        if self._fields.logprobs is None:
            return "null"
        texts, none = self._call.texts, "null"
        columns: list[list[str]] = [[], [], [], []]
        for start in range(0, len(token_ids), POSITIONS_A_TURN):
            stop = start + POSITIONS_A_TURN
            for token_id, position in zip(token_ids[start:stop], logprobs[start:stop], strict=True):
                text, own, top = texts[token_id], none, none
                if position.HasField("chosen"):  # the first token of a prompt has no log-probability
                    own = json.dumps(position.chosen.logprob)
                    likeliest_last = (position.chosen, *reversed(position.top))
                    top = json.dumps({texts[one.token_id]: one.logprob for one in likeliest_last})
                row = (json.dumps(text), own, top, str(choice.offset))
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell)
                choice.offset += len(text)
            await asyncio.sleep(0)  # lets other tasks run
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        members = (f'"{name}": [{", ".join(cells)}]' for name, cells in zip(names, columns, strict=True))
        return f"{{{', '.join(members)}}}"

    def _usage(self) -> dict[str, Any]:
        prompt = sum(prompt.num_tokens for prompt in self._prompts)
        output = 0 if self._fields.max_tokens == 0 else sum(prompt.num_output for prompt in self._prompts)
        cached = sum(prompt.num_cached for prompt in self._prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
