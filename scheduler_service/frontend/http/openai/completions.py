"""OpenAI's /v1/completions: one prompt or several, as texts or token ids, with log-probabilities and `echo`."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.prompt_embeds import read_embeddings_header
from scheduler_service.frontend.checking.prompt import decode_tokens, encode_prompt
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.openai.completion_fields import CompletionFields, completion_params, given_prompts
from scheduler_service.frontend.http.openai.logprobs import POSITIONS_A_TURN, shown_columns, shown_prompt_logprobs
from scheduler_service.frontend.http.openai.sampling_fields import kept_tokens
from scheduler_service.frontend.http.resuming.event_ids import HEADER
from scheduler_service.frontend.http.writing import answer_in_parts
from scheduler_service.frontend.model import ServedModel

MAX_PROMPTS = 256
MAX_PARAMETER_BYTES = 4 << 20
"""Maximum size in bytes of the sampling parameters, summed over the prompts of a request. Each prompt has a copy of the
parameters.
"""
TOKEN_BYTES = 40
LOGPROB_BYTES = 100
"""Approximate bytes of memory for each log-probability of an answer."""
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
    continues: bool = False
    """Whether an event of a stream has preceded."""
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
    logprobs: str = ""
    """The log-probabilities of the prompt as JSON."""


async def complete(call: Call) -> web.StreamResponse:
    fields = await call.fields(CompletionFields, takes_embeds=True)
    return await _Completions(call, fields, await call.model()).answer()


class _Completions:
    """One call of /v1/completions."""

    def __init__(self, call: Call, fields: CompletionFields, model: ServedModel) -> None:
        self._call, self._fields, self._model = call, fields, model
        self._num_choices = fields.n or 1
        self._events = call.events(model, is_streamed=fields.stream is True, num_outputs=self._num_choices)
        origin = self._events.origin
        self._id = f"cmpl-{origin.base}"
        self._head = {"id": self._id, "object": "text_completion", "created": origin.created}
        self._head["model"] = fields.model or model.name
        self._prompts: list[_Prompt] = []
        self._beginning = asyncio.Lock()
        self._sending = asyncio.Lock()

    async def answer(self) -> web.StreamResponse:
        fields = self._fields
        if fields.stream and fields.echo and (fields.logprobs is not None or fields.max_tokens == 0):
            raise invalid("echo with logprobs, or with max_tokens 0, cannot be streamed", "echo")
        if fields.stream and fields.prompt_logprobs is not None:
            raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
        sampling = completion_params(fields, self._model)
        given = await given_prompts(fields, self._call.held)
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise invalid(f"prompt has {len(given)} entries; it must have 1 to {MAX_PROMPTS}")
        num_bytes = len(given) * sampling.ByteSize()
        if num_bytes > MAX_PARAMETER_BYTES:
            raise invalid(f"the parameters of all prompts have {num_bytes} bytes; they may have {MAX_PARAMETER_BYTES}")
        if len(given) > 1 and self._events.has_ids:
            raise invalid(f"{HEADER} is not for a stream of several prompts; send a request for each", HEADER)
        self._call.held.take(num_bytes)
        for one in given:
            self._prompts.append(await self._prepare(one, sampling))
            await asyncio.sleep(0)  # lets other tasks run
        if fields.stream:
            return await self._stream()
        await self._follow_all(self._take)
        for prompt in self._prompts:
            if fields.prompt_logprobs is not None:
                entries = await shown_prompt_logprobs(prompt.echo, self._call.texts, self._model)
                prompt.logprobs = f"[{', '.join(entries)}]"
            await self._learn(prompt.echo)
            for choice in prompt.choices:
                await self._learn(choice.logprobs, choice.token_ids)
            if fields.logprobs is not None:
                await self._learn([], prompt.asked.token_ids.ids)
        whole = json.dumps(self._head | {"usage": self._usage()}).encode()
        return await answer_in_parts(self._call.request, whole, b"choices", self._finished())

    async def _prepare(self, given: str | list[int] | bytes, sampling: pb.SamplingParams) -> _Prompt:
        """Make the request of one prompt, and the text that it echoes."""
        call, fields = self._call, self._fields
        kept, from_start = kept_tokens(fields, sampling, self._model), fields.truncation_side == "right"
        asked = pb.GenerateRequest(
            request_id=f"{fields.request_id or self._id}-{len(self._prompts)}",
            sampling=sampling,
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            parse_special_tokens=fields.parse_special_tokens and isinstance(given, str),
            truncate_prompt_tokens=None if from_start else kept,
            lora_name=call.adapter(fields.model, self._model),
        )
        text, num_embeddings = "", 0
        if isinstance(given, str):
            asked.text = text = given
            counts = fields.stream_options is not None and fields.stream_options.in_events
            if counts or from_start or fields.return_token_ids or (fields.echo and fields.logprobs is not None):
                tokenized = pb.TokenizeRequest(text=given, parse_special_tokens=fields.parse_special_tokens)
                asked.parse_special_tokens = False
                asked.token_ids.ids.extend((await encode_prompt(tokenized, self._model)).token_ids)
        elif isinstance(given, bytes):
            asked.parts.parts.add(prompt_embeds=given)
            with contextlib.suppress(ValueError):  # refused with the request
                num_embeddings = read_embeddings_header(given).num_embeddings
        else:
            asked.token_ids.ids.extend(given)
            if fields.echo:
                shown = pb.DetokenizeRequest(token_ids=given, skip_special_tokens=False)
                text = (await decode_tokens(shown, self._model)).text
                call.held.take(len(text))
        if from_start:
            del asked.token_ids.ids[kept:]
        self._events.prepare(asked)
        choices = [_Choice() for _ in range(self._num_choices)]
        return _Prompt(asked, text, choices, num_tokens=num_embeddings or len(_prompt_ids(asked)))

    async def _follow_all(self, take: Callable[[int, pb.GenerateResponse], Awaitable[None]]) -> None:
        """Read the streams of all prompts of the call. Raises the RequestError of the first prompt that is refused.

        The other streams then end too, but not in the middle of an event.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            for number in range(len(self._prompts)):
                tasks.append(asyncio.create_task(self._follow(number, take)))
                await asyncio.sleep(0)  # begun at once, 256 prompts would hold the event loop for 50 ms
            await asyncio.gather(*tasks)
        except RequestError:
            async with self._sending:
                for task in tasks:
                    task.cancel()
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _follow(self, number: int, take: Callable[[int, pb.GenerateResponse], Awaitable[None]]) -> None:
        prompt = self._prompts[number]
        async with self._call.service.generate(prompt.asked, self._call.metadata, self._events.position) as messages:
            async for message in messages:
                prompt.echo += message.prompt_logprobs
                prompt.num_output += len(message.token_ids)
                if message.HasField("usage"):
                    prompt.num_tokens = message.usage.prompt_tokens
                    prompt.num_cached = message.usage.cached_tokens
                await take(number, message)

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
        except RequestError as error:
            if not self._events.has_begun:
                raise
            await self._send(json.dumps(self._events.failure(error).body))
        await self._begin()
        options = self._fields.stream_options
        if options is not None and options.at_end:
            await self._send(json.dumps(self._head | {"choices": [], "usage": self._usage()}))
        return await self._events.end("data: [DONE]")

    async def _write(self, number: int, message: pb.GenerateResponse) -> None:
        await self._begin()
        self._events.advance(message.index, message.token_ids)
        choice = self._prompts[number].choices[message.index]
        gained = _Choice(offset=choice.offset, continues=choice.continues)
        gained.add(message)
        choice.continues = True
        await self._learn(gained.logprobs, gained.token_ids)
        shown = await self._shown(number, message.index, gained, gained.token_ids, gained.logprobs)
        choice.offset = gained.offset
        await self._send_choice(shown)

    async def _begin(self) -> None:
        async with self._beginning:
            if not self._events.has_begun:
                await self._events.begin()
                for number, prompt in enumerate(self._prompts if self._fields.echo else ()):
                    for place in range(self._num_choices):
                        await self._send_choice(await self._shown(number, place, _Choice(prompt.text), [], []))

    async def _send_choice(self, shown: str) -> None:
        head, usage = json.dumps(self._head).removesuffix("}"), ""
        if (options := self._fields.stream_options) is not None and options.at_end:
            usage = f', "usage": {json.dumps(self._usage() if options.in_events else None)}'
        await self._send(f'{head}, "choices": [{shown}]{usage}}}')

    async def _send(self, event: str) -> None:
        async with self._sending:  # a large event takes several writes; the lock keeps events apart
            await self._events.send(f"data: {event}")

    # ---- for whole answers and for streams

    async def _shown(
        self, number: int, place: int, choice: _Choice, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
    ) -> str:
        """A choice as JSON."""
        shown: dict[str, Any] = {
            "index": number * self._num_choices + place,
            "text": choice.text,
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_reason,
        }
        if not self._fields.stream:
            shown |= {"token_ids": None, "prompt_token_ids": None}
        if self._fields.return_token_ids:
            shown["token_ids"] = choice.token_ids
            if not choice.continues:
                asked = self._prompts[number].asked
                shown["prompt_token_ids"] = None if asked.HasField("parts") else _prompt_ids(asked)
        found = await self._shown_logprobs(choice, token_ids, logprobs)
        if not self._fields.stream:
            found += f', "prompt_logprobs": {self._prompts[number].logprobs or "null"}'
        return f'{json.dumps(shown).removesuffix("}")}, "logprobs": {found}}}'

    async def _learn(self, logprobs: Sequence[pb.TokenLogprobs], token_ids: Sequence[int] = ()) -> None:
        if self._fields.logprobs is not None:
            for start in range(0, max(len(token_ids), len(logprobs)), POSITIONS_A_TURN):
                stop = start + POSITIONS_A_TURN
                named = {*token_ids[start:stop]}
                for position in logprobs[start:stop]:
                    named.update(one.token_id for one in (position.chosen, *position.top))
                await self._call.texts.learn(self._model, named)
                await asyncio.sleep(0)  # lets other tasks run

    async def _shown_logprobs(
        self, choice: _Choice, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
    ) -> str:
        """The log-probabilities as JSON, or null if none were requested. If several tokens have the same text, only the
        likeliest token is kept.
        """
        if self._fields.logprobs is None:
            return "null"
        as_ids = self._fields.return_tokens_as_token_ids
        found, choice.offset = await shown_columns(
            self._call.texts, token_ids, logprobs, choice.offset, as_token_ids=as_ids
        )
        return found

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


def _prompt_ids(asked: pb.GenerateRequest) -> list[int]:
    """The token ids of a prompt that the model reads."""
    return list(asked.token_ids.ids[-asked.truncate_prompt_tokens :])
