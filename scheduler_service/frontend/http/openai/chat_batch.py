"""vLLM's /v1/chat/completions/batch: several conversations with the same parameters, each with a choice of its own."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.openai.chat import Chat
from scheduler_service.frontend.http.openai.chat_fields import ChatFields
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
    fields = await call.fields(BatchFields)
    for name, is_set in (("stream", fields.stream), ("n", (fields.n or 1) > 1)):
        if is_set:
            raise invalid(f"{name} is {str(getattr(fields, name)).lower()}; a batch has one whole answer each", name)
    model = await call.model()
    chats = [Chat(call, fields.chat(number), model, number) for number in range(len(fields.messages))]
    tasks = [asyncio.create_task(chat.whole()) for chat in chats]
    try:
        wholes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    head = wholes[0][0] | {"usage": _sum([one["usage"] for one, _ in wholes])}

    async def choices() -> AsyncIterator[bytes]:
        for _, parts in wholes:
            async for part in parts:
                yield part

    return await answer_in_parts(call.request, json.dumps(head).encode(), b"choices", choices())


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of usages, whose numbers may be nested."""
    numbers: Counter[str] = Counter()
    for usage in usages:
        numbers.update({name: number for name, number in usage.items() if isinstance(number, int)})
    nested = {name: _sum([usage[name] for usage in usages]) for name in usages[0] if isinstance(usages[0][name], dict)}
    return dict(numbers) | nested
