"""vLLM's /v1/chat/completions/batch: several conversations with the same parameters, each with a choice of its own."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.calls.together import run_together
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import HttpError, image_places, invalid, of_part
from scheduler_service.frontend.http.openai.chat import Chat, Whole
from scheduler_service.frontend.http.openai.chat_fields import ChatFields
from scheduler_service.frontend.http.openai.completions import MAX_PARAMETER_BYTES
from scheduler_service.frontend.http.service import ChatRequest
from scheduler_service.frontend.http.writing import answer_in_parts

MAX_CONVERSATIONS = 256
"""Conversations of a request. Each counts as a request against the key's quotas."""


class BatchFields(ChatFields):
    """The fields of a chat. `messages` has the messages of each conversation."""

    messages: Annotated[  # type: ignore[assignment]
        list[list[dict[str, Any]]], Field(fail_fast=True, min_length=1, max_length=MAX_CONVERSATIONS)
    ]

    def chat(self, number: int) -> ChatFields:
        """The fields of one conversation."""
        names = {"request_id": f"{self.request_id}-{number}"} if self.request_id else {}
        return ChatFields.model_construct(**dict(self) | {"messages": self.messages[number]} | names)


async def chat_batch(call: Call) -> web.StreamResponse:
    fields = await call.fields(BatchFields, takes_images=True)
    for name, is_set in (("stream", fields.stream), ("n", (fields.n or 1) > 1)):
        if is_set:
            raise invalid(f"{name} is {str(getattr(fields, name)).lower()}; a batch has one whole answer each", name)
    model = await call.model()
    prepared: list[tuple[Chat, ChatRequest, Mapping[str, str]]] = []
    for number in range(len(fields.messages)):
        chat = Chat(call, fields.chat(number), model, number)
        with _named(number):
            prepared.append((chat, await chat.prepare(), image_places.get({})))
        if not number:
            _check_copies(prepared[0][1].asked, len(fields.messages))
        await asyncio.sleep(0)  # lets other tasks run
    answers = (_whole(number, *one) for number, one in enumerate(prepared))
    wholes = await run_together(answers)
    head = wholes[0].head | {"usage": _sum([one.head["usage"] for one in wholes])}

    async def choices() -> AsyncIterator[bytes]:
        for one in wholes:
            async for choice in one.choices:
                yield choice[:-1] + f", {one.prompt}}}".encode()

    return await answer_in_parts(call.request, json.dumps(head).encode(), b"choices", choices())


async def _whole(number: int, chat: Chat, request: ChatRequest, places: Mapping[str, str]) -> Whole:
    """`places`: the conversation's `image_places`, because each conversation has set its own."""
    image_places.set(places)
    with _named(number):
        return await chat.whole(request)


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Errors about one conversation alone say which."""
    try:
        yield
    except (HttpError, RequestError) as error:
        raise of_part(f"conversation {number}", error, "messages") from None


def _check_copies(asked: pb.GenerateRequest, number: int) -> None:
    """Refuse a batch whose copies of the shared fields would be too large. Raises HttpError."""
    num_bytes = number * (asked.ByteSize() - sum(message.ByteSize() for message in asked.chat.messages))
    if num_bytes > MAX_PARAMETER_BYTES:
        reason = f"the fields beside messages have {num_bytes} bytes, once for each conversation"
        raise invalid(f"{reason}; they may have {MAX_PARAMETER_BYTES}")


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of usages, whose numbers may be nested."""
    numbers: Counter[str] = Counter()
    for usage in usages:
        numbers.update({name: number for name, number in usage.items() if isinstance(number, int)})
    nested = {name: _sum([usage[name] for usage in usages]) for name in usages[0] if isinstance(usages[0][name], dict)}
    return dict(numbers) | nested
