"""Anthropic's /v1/messages, whole or streamed, and /v1/messages/count_tokens."""

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.calls.request_limits import request_size
from scheduler_service.frontend.checking.prompt import encode_prompt
from scheduler_service.frontend.http.anthropic.blocks import Blocks, WholeBlock, add_to_whole
from scheduler_service.frontend.http.anthropic.chat import chat_fields
from scheduler_service.frontend.http.anthropic.errors import error_body
from scheduler_service.frontend.http.anthropic.fields import CountFields, MessagesFields
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.chats.chat_answers import ChatDelta
from scheduler_service.frontend.http.errors import HttpError, failed
from scheduler_service.frontend.http.openai.chat import TOKEN_BYTES
from scheduler_service.frontend.http.openai.chat_request import chat_request
from scheduler_service.frontend.http.writing import answer_in_parts
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.model import ServedModel

NOT_ENDED = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
"""The end of a message that has not ended. Anthropic's schema requires all members."""


async def messages(call: Call) -> web.StreamResponse:
    fields = await call.fields(MessagesFields, takes_images=True)
    model = await call.model()
    return await _Message(call, fields, model).answer()


async def count_tokens(call: Call) -> web.StreamResponse:
    """Count the tokens of a prompt that /v1/messages would use for the same fields."""
    fields = await call.fields(CountFields, takes_images=True)
    model = await call.model()
    adapter = call.adapter(fields.model, model)
    images = call.images(model)
    chat = await chat_fields(fields, model, images)
    request = await chat_request(chat, model, adapter, "", call.service, images)
    with EngineCall(call.service.link) as admitted:
        await admitted.admit_side_call(request_size.get())
        prompt = await encode_prompt(pb.TokenizeRequest(chat=request.asked.chat), model)
    return web.json_response({"input_tokens": len(prompt.token_ids)})


class _Message:
    """One call of /v1/messages."""

    def __init__(self, call: Call, fields: MessagesFields, model: ServedModel) -> None:
        self._call, self._fields, self._model = call, fields, model
        self._events = call.events(model, is_streamed=fields.stream is True, has_ids=True)
        self._base = self._events.origin.base
        self._blocks = Blocks(self._base)
        self._num_prompt_tokens = self._num_cached = self._num_tokens = self._num_thinking = 0
        self._ended: dict[str, Any] = {}

    async def answer(self) -> web.StreamResponse:
        fields, service, model = self._fields, self._call.service, self._model
        images, adapter = self._call.images(model), self._call.adapter(fields.model, model)
        chat = await chat_fields(fields, model, images)
        message_id = f"msg_{self._base}"
        request = await chat_request(chat, model, adapter, message_id, service, images, fits_max_tokens=True)
        self._blocks = Blocks(self._base, request.syntax.call_id, chat.include_reasoning)
        self._events.prepare(request.asked)
        try:
            async with service.chat(request, self._call.metadata, self._events.position) as deltas:
                return await (self._stream(deltas) if fields.stream else self._whole(deltas))
        except (RequestError, HttpError) as error:
            if not self._events.has_begun:
                raise
            await self._send([error_body(self._events.failure(error), self._call.request_id)])
            return await self._events.end()

    async def _whole(self, deltas: AsyncIterator[ChatDelta]) -> web.StreamResponse:
        blocks: list[WholeBlock] = []
        async for delta in deltas:
            self._call.held.take(len(delta.message.text) + TOKEN_BYTES * len(delta.message.token_ids))
            add_to_whole(blocks, self._add(delta))

        async def parts() -> AsyncIterator[bytes]:
            for block in blocks:
                yield block.json().encode()

        return await answer_in_parts(self._call.request, json.dumps(self._head()).encode(), b"content", parts())

    async def _stream(self, deltas: AsyncIterator[ChatDelta]) -> web.StreamResponse:
        """Stream the blocks as events. An error after the first event becomes the last event."""
        async for delta in deltas:
            events = self._add(delta)
            self._events.advance(delta.message.index, delta.message.token_ids)
            if not self._events.has_begun:
                await self._events.begin()
                started = self._head() | {"content": [], **NOT_ENDED}
                await self._send([{"type": "message_start", "message": started}])
            await self._send(events)
        ended = {"type": "message_delta", "delta": NOT_ENDED | self._ended, "usage": self._usage()}
        await self._send([ended, {"type": "message_stop"}])
        return await self._events.end()

    async def _send(self, events: Iterable[dict[str, Any]]) -> None:
        await self._events.send(*(f"event: {event['type']}\ndata: {json.dumps(event)}" for event in events))

    def _add(self, delta: ChatDelta) -> list[dict[str, Any]]:
        """Count a delta and convert it to Anthropic's events. Raises HttpError if the output failed."""
        message = delta.message
        self._num_prompt_tokens, self._num_cached = delta.num_prompt_tokens, delta.num_cached_tokens
        events = self._blocks.add(delta.events)
        self._num_tokens += len(message.token_ids)
        self._num_thinking += delta.num_reasoning_tokens
        if message.finish_reason:
            events += self._blocks.end()
            self._ended = self._ending(message)
        return events

    def _ending(self, message: pb.GenerateResponse) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if message.finish_reason == pb.FINISH_REASON_LENGTH:
            is_asked = self._num_tokens >= self._fields.max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif message.finish_reason != pb.FINISH_REASON_STOP:
            raise failed(message.error)
        elif message.stop_string in (self._fields.stop_sequences or ()):
            reason, sequence = "stop_sequence", message.stop_string
        elif self._blocks.num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _head(self) -> dict[str, Any]:
        """The message without its content."""
        name = self._fields.model or self._model.name
        head = {"id": f"msg_{self._base}", "type": "message", "role": "assistant", "model": name}
        usage = self._usage() | {"service_tier": "standard", "cache_creation": None, "inference_geo": None}
        return head | NOT_ENDED | self._ended | {"usage": usage}

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"thinking_tokens": self._num_thinking},
            "server_tool_use": None,
        }
