"""POST /v1/responses: a response, whole or as a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.http.body import too_large
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.chats.chat_answers import ChatDelta
from scheduler_service.frontend.http.errors import HttpError, failed, refused_by
from scheduler_service.frontend.http.openai.chat import LOGPROB_BYTES, TOKEN_BYTES
from scheduler_service.frontend.http.openai.chat_request import chat_request
from scheduler_service.frontend.http.openai.logprobs import shown_logprobs
from scheduler_service.frontend.http.responses import stored
from scheduler_service.frontend.http.responses.chat_body import as_asked, chat_fields
from scheduler_service.frontend.http.responses.conversation import read_conversation
from scheduler_service.frontend.http.responses.fields import ResponseFields
from scheduler_service.frontend.http.responses.output_items import OutputItems, Shown
from scheduler_service.frontend.http.responses.references import resolve_references
from scheduler_service.frontend.http.responses.response_object import ResponseObject, usage
from scheduler_service.frontend.http.service import ChatRequest
from scheduler_service.frontend.http.writing import answer_in_parts
from scheduler_service.frontend.link.stored_texts import MAX_STORED_BYTES
from scheduler_service.frontend.model import ServedModel

_STATUSES = {
    pb.FINISH_REASON_STOP: "completed",
    pb.FINISH_REASON_LENGTH: "incomplete",
    pb.FINISH_REASON_ABORT: "cancelled",
}
_LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}


async def create_response(call: Call) -> web.StreamResponse:
    fields = await call.fields(ResponseFields, takes_images=True)
    return await _Creation(call, fields, await call.model()).answer()


class _Creation:
    """One call of POST /v1/responses."""

    def __init__(self, call: Call, fields: ResponseFields, model: ServedModel) -> None:
        self._call, self._fields, self._model = call, fields, model
        self._events = call.events(model, is_streamed=fields.stream is True, has_ids=True)
        self._base = self._events.origin.base
        self._items_before = b""
        self._output = OutputItems(self._base)
        self._num_prompt_tokens = self._num_cached = self._num_reasoning = 0

    async def answer(self) -> web.StreamResponse:
        call, fields = self._call, self._fields
        try:
            request = await self._request()
            name = fields.model or self._model.name
            created = self._events.origin.created
            self._response = ResponseObject(f"resp_{self._base}", created, name, fields, self._model.defaults)
            self._output = OutputItems(
                self._base,
                request.syntax.call_id,
                is_streamed=fields.stream is True,
                has_encrypted=fields.has_encrypted,
            )
            self._events.prepare(request.asked)
            async with call.service.chat(request, call.metadata, self._events.position) as deltas:
                async for delta in deltas:
                    await self._add(delta)
            return await (self._finish_stream() if self._events.has_begun else self._whole())
        except (RequestError, HttpError) as error:
            return await self._fail(error)

    async def _request(self) -> ChatRequest:
        """The request of a chat. The input is emptied. Raises HttpError and RequestError."""
        fields, service = self._fields, self._call.service
        before: list[dict[str, Any]] = []
        if fields.previous_response_id is not None:
            before = await stored.previous_items(service, fields.previous_response_id, self._call.held)
        if isinstance(fields.input, str):
            given: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": fields.input}]
        else:
            given = await resolve_references(service, fields.input, self._call.held)
        places = [("previous_response_id", item) for item in before]
        places += [(f"input[{number}]", item) for number, item in enumerate(given)]
        if fields.store:
            if (num_bytes := self._call.num_body_bytes) > self._call.most_bytes:
                raise too_large(num_bytes, self._call.most_bytes, "and store is true")
            self._items_before = stored.items_to_store([*before, *given])
            self._call.held.take(len(self._items_before))
        fields.input = ""
        images = self._call.images(self._model)
        chat = chat_fields(fields, await read_conversation(fields.instructions, places, images))
        adapter = self._call.adapter(fields.model, self._model)
        return await chat_request(chat, self._model, adapter, f"resp_{self._base}", service, images)

    async def _add(self, delta: ChatDelta) -> None:
        message = delta.message
        self._num_prompt_tokens, self._num_cached = delta.num_prompt_tokens, delta.num_cached_tokens
        self._num_reasoning += delta.num_reasoning_tokens
        num_logprobs = sum(1 + len(one.top) for one in message.logprobs)
        self._call.held.take(len(message.text) + TOKEN_BYTES * len(message.token_ids) + LOGPROB_BYTES * num_logprobs)
        logprobs: list[str] = []
        if message.logprobs:
            logprobs = await shown_logprobs(message.logprobs, self._call.texts, self._model, as_token_ids=False)
            await asyncio.sleep(0)  # lets other tasks run
        self._events.advance(message.index, message.token_ids)
        if self._fields.stream and not self._events.has_begun:
            await self._events.begin()
            begun = f'"response": {self._response.begun()}'
            await self._send([("response.created", begun), ("response.in_progress", begun)])
        await self._send(self._output.add(delta.events, len(message.token_ids), logprobs))
        if message.finish_reason:
            if message.finish_reason not in _STATUSES:
                raise failed(message.error)
            self._response.status = _STATUSES[message.finish_reason]
            await self._send(self._output.finish(is_cut=self._response.status != "completed"))

    async def _send(self, events: Iterable[Shown]) -> None:
        """Send the events of a stream; drop those of a whole answer."""
        written = [
            f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {number}, {members}}}'
            for number, (kind, members) in enumerate(events, self._events.number)
        ]
        if self._events.has_begun:
            await self._events.send(*written)

    # ---- the end

    async def _head(self) -> str:
        """The JSON of the response before its output. A response that is to be stored is stored first."""
        counted = usage(self._output, self._num_prompt_tokens, self._num_cached, self._num_reasoning)
        head = self._response.head(counted)
        if self._response.is_stored and not await self._store(head):
            self._response.is_stored = False
            head = self._response.head(counted)
        return head

    async def _store(self, head: str) -> bool:
        """Returns whether the response is stored. Failed and very large responses are not."""
        items = self._output.items
        if self._response.status not in ("completed", "incomplete"):
            return False
        if sum(item.num_characters for item in items) > MAX_STORED_BYTES:
            return False
        output = ", ".join(item.json() for item in items)
        found = stored.Stored(f'{head}"output": [{output}]}}'.encode(), self._items_before)
        return await stored.store(self._call.service, self._response.id, found)

    async def _whole(self) -> web.StreamResponse:
        async def parts() -> AsyncIterator[bytes]:
            for item in self._output.items:
                yield item.json().encode()

        head = await self._head()
        whole = (head.removesuffix(", ") + "}").encode()
        return await answer_in_parts(self._call.request, whole, b"output", parts())

    async def _finish_stream(self) -> web.StreamResponse:
        """Send the last event, whose response has all items, in pieces."""
        kind = _LAST_EVENTS.get(self._response.status, "response.incomplete")
        head = f'{{"type": "{kind}", "sequence_number": {self._events.number}'
        await self._events.send_in_parts(self._last_event(f"event: {kind}\ndata: {head}", await self._head()))
        return await self._events.end()

    def _last_event(self, before: str, head: str) -> Iterator[str]:
        yield f'{before}, "response": {head}"output": ['
        for number, item in enumerate(self._output.items):
            yield f"{', ' if number else ''}{item.json()}"
        yield "]}}"

    async def _fail(self, error: RequestError | HttpError) -> web.StreamResponse:
        """Raise the error, or send it as the stream's last event."""
        if not self._events.has_begun:
            raise as_asked(error if isinstance(error, HttpError) else refused_by(error))
        is_resumable = self._events.is_resumable_after(error)
        found = as_asked(self._events.failure(error))
        code = "rate_limit_exceeded" if found.status == 429 else "server_error"
        self._response.status = "failed"
        self._response.error = {"code": code, "message": found.body["error"]["message"]}
        ended = list(self._output.finish(is_cut=True))
        if not is_resumable:  # a resumed stream continues the last item, which therefore has no end here
            await self._send(ended)
        return await self._finish_stream()
