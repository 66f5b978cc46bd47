"""OpenAI's /v1/chat/completions: an assistant's message with reasoning and tool calls, whole or streamed."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.chats.chat_answers import ChatDelta
from scheduler_service.frontend.http.errors import HttpError
from scheduler_service.frontend.http.openai.chat_choice import ChatChoice
from scheduler_service.frontend.http.openai.chat_fields import ChatFields
from scheduler_service.frontend.http.openai.chat_request import chat_request
from scheduler_service.frontend.http.openai.logprobs import shown_logprobs, shown_prompt_logprobs
from scheduler_service.frontend.http.service import ChatRequest
from scheduler_service.frontend.http.writing import answer_in_parts
from scheduler_service.frontend.model import ServedModel

TOKEN_BYTES = 40
LOGPROB_BYTES = 200
"""Approximate bytes of memory for each log-probability of an answer."""
_DONE = "data: [DONE]"
REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


async def chat(call: Call) -> web.StreamResponse:
    fields = await call.fields(ChatFields, takes_images=True)
    model = await call.model()
    return await Chat(call, fields, model).answer()


class Whole(NamedTuple):
    """A whole answer. `head`: its members without choices and prompt. `prompt`: the members about the prompt, as JSON.

    `choices`: each as JSON, made immediately before it is sent.
    """

    head: dict[str, Any]
    prompt: str
    choices: AsyncIterator[bytes]


class Chat:
    """One call of /v1/chat/completions. `first`: the index of its first choice."""

    def __init__(self, call: Call, fields: ChatFields, model: ServedModel, first: int = 0) -> None:
        self._call, self._fields, self._model, self._first = call, fields, model, first
        self._events = call.events(model, is_streamed=fields.stream is True, num_outputs=fields.n or 1)
        origin = self._events.origin
        self._id = f"chatcmpl-{origin.base}"
        self._head = {"id": self._id, "created": origin.created, "model": fields.model or model.name}
        self._base = origin.base
        self._choices: list[ChatChoice] = []
        self._num_prompt_tokens = self._num_cached = self._num_reasoning = 0

    async def answer(self) -> web.StreamResponse:
        if not self._fields.stream:
            whole = await self.whole(await self.prepare())
            head = f"{json.dumps(whole.head)[:-1]}, {whole.prompt}}}".encode()
            return await answer_in_parts(self._call.request, head, b"choices", whole.choices)
        request = await self.prepare()
        self._events.prepare(request.asked)
        try:
            async with self._call.service.chat(request, self._call.metadata, self._events.position) as deltas:
                return await self._stream(deltas)
        except (RequestError, HttpError) as error:
            if not self._events.has_begun:
                raise
            await self._send(self._events.failure(error).body)
        return await self._events.end(_DONE)

    async def prepare(self) -> ChatRequest:
        """The request. Fields that were read are emptied. Raises HttpError and RequestError."""
        fields, model = self._fields, self._model
        echoed = fields.echoed
        self._call.held.take(len(echoed) * (fields.n or 1))
        adapter = self._call.adapter(fields.model, model)
        request = await chat_request(fields, model, adapter, self._id, self._call.service, self._call.images(model))
        self._choices = [
            ChatChoice(self._first + index, self._base, request.syntax.call_id, fields.include_reasoning, [echoed])
            for index in range(fields.n or 1)
        ]
        return request

    # ---- whole answers

    async def whole(self, request: ChatRequest) -> Whole:
        """Raises HttpError and RequestError."""
        async with self._call.service.chat(request, self._call.metadata) as deltas:
            return await self._collect(deltas)

    async def _collect(self, deltas: AsyncIterator[ChatDelta]) -> Whole:
        logprobs: list[list[str]] = [[] for _ in self._choices]
        token_ids: list[list[int]] = [[] for _ in self._choices]
        ends: list[dict[str, Any]] = [{} for _ in self._choices]
        prompt_ids: Sequence[int] = ()
        prompt_logprobs: list[pb.TokenLogprobs] = []
        async for delta in deltas:
            message = delta.message
            num_logprobs = sum(1 + len(one.top) for one in (*message.logprobs, *message.prompt_logprobs))
            num_bytes = len(message.text) + TOKEN_BYTES * len(message.token_ids) + LOGPROB_BYTES * num_logprobs
            self._call.held.take(num_bytes)
            choice = self._choices[message.index]
            self._count(delta)
            choice.add(delta.events, len(message.token_ids), keeps=True)
            logprobs[message.index] += await self._shown(message)
            if self._fields.return_token_ids:
                token_ids[message.index] += message.token_ids
                prompt_ids = delta.prompt_token_ids
            prompt_logprobs += message.prompt_logprobs  # those of a long prompt come in several messages
            if message.finish_reason:
                ends[message.index] = ended(choice, message)
        ids = list(prompt_ids) if self._fields.return_token_ids else "null"
        entries = "null"
        if self._fields.prompt_logprobs is not None:
            shown = await shown_prompt_logprobs(prompt_logprobs, self._call.texts, self._model)
            entries = f"[{', '.join(shown)}]"
        head = self._head | {"object": "chat.completion", "usage": self._usage()}

        async def parts() -> AsyncIterator[bytes]:
            for choice, tokens, output_ids, over in zip(self._choices, logprobs, token_ids, ends, strict=True):
                shown = {"index": choice.index, "message": choice.message()} | over
                shown["token_ids"] = output_ids if self._fields.return_token_ids else None
                yield _with_logprobs(shown, tokens if self._fields.logprobs else None).encode()

        return Whole(head, f'"prompt_token_ids": {ids}, "prompt_logprobs": {entries}', parts())

    # ---- streams

    async def _stream(self, deltas: AsyncIterator[ChatDelta]) -> web.StreamResponse:
        """Stream the choices as events. An error after the first event becomes the last event."""
        options = self._fields.stream_options
        head = json.dumps(self._head | {"object": "chat.completion.chunk"}).removesuffix("}")
        has_prompt = False
        async for delta in deltas:
            message, choice = delta.message, self._choices[delta.message.index]
            self._count(delta)
            self._events.advance(message.index, message.token_ids)
            events = choice.add(delta.events, len(message.token_ids), keeps=False)
            over = ended(choice, message) if message.finish_reason else None
            await self._events.begin()
            if choice.num_tokens == len(message.token_ids):  # the first delta of the choice
                start = "".join(choice.content) + events.get("content", "")  # `choice.content`: the echo
                events = {"role": "assistant"} | events | {"content": start}
            entries = await self._shown(message)
            if not (events or entries or over or self._fields.return_token_ids):
                continue
            shown = {"index": choice.index, "delta": events} | (over or {"finish_reason": None})
            further = ""
            if self._fields.return_token_ids:
                shown["token_ids"] = list(message.token_ids)
                if not has_prompt:
                    further = f', "prompt_token_ids": {list(delta.prompt_token_ids)}'
                    has_prompt = True
            if options is not None and options.at_end:
                further += f', "usage": {json.dumps(self._usage() if options.in_events else None)}'
            text = _with_logprobs(shown, entries if self._fields.logprobs else None)
            await self._events.send(f'data: {head}, "choices": [{text}]{further}}}')
        if options is not None and options.at_end:
            last = self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}
            await self._send(last)
        return await self._events.end(_DONE)

    async def _send(self, event: dict[str, Any]) -> None:
        await self._events.send(f"data: {json.dumps(event)}")

    # ---- for whole answers and for streams

    async def _shown(self, message: pb.GenerateResponse) -> list[str]:
        if not self._fields.logprobs or not message.logprobs:
            return []
        as_ids = self._fields.return_tokens_as_token_ids
        shown = await shown_logprobs(message.logprobs, self._call.texts, self._model, as_token_ids=as_ids)
        await asyncio.sleep(0)  # lets other tasks run
        return shown

    def _count(self, delta: ChatDelta) -> None:
        self._num_prompt_tokens = delta.num_prompt_tokens
        self._num_cached = delta.num_cached_tokens
        self._num_reasoning += delta.num_reasoning_tokens

    def _usage(self) -> dict[str, Any]:
        output = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self._num_prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning},
        }


def ended(choice: ChatChoice, message: pb.GenerateResponse) -> dict[str, Any]:
    """The end of a choice. If one of several outputs failed, its `stop_reason` is the error; the others go on."""
    named = message.WhichOneof("stop_reason")
    reason = choice.finish_reason(REASONS[message.finish_reason])
    return {"finish_reason": reason, "stop_reason": getattr(message, named) if named else message.error.message or None}


def _with_logprobs(shown: dict[str, Any], entries: list[str] | None) -> str:
    """A choice as JSON, with log-probabilities that are JSON already."""
    found = "null" if entries is None else f'{{"content": [{", ".join(entries)}], "refusal": null}}'
    return f'{json.dumps(shown).removesuffix("}")}, "logprobs": {found}}}'
