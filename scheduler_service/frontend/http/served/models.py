"""OpenAI's /v1/models: the served model, and the adapters that the API key may name, in the format of vLLM's list."""

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from scheduler_service.frontend.http.call import Call, no_such_model

_CREATED = int(time.time())


async def models(call: Call) -> web.StreamResponse:
    """List all models, or the model that the path names."""
    found = await call.service.get_model(call.metadata)
    chats = (await call.model()).chats if found.has_chat_template else None
    listed = [_shown(name, found.name, found.context_length, chats) for name in (found.name, *found.lora_names)]
    name = call.request.path.removeprefix("/v1/models").removeprefix("/")
    if not name:
        return web.json_response({"object": "list", "data": listed})
    for one in listed:
        if one["id"] == name:
            return web.json_response(one)
    raise no_such_model(name, [one["id"] for one in listed])


def _shown(name: str, base: str, context_length: int, chats: Mapping[str, str] | None) -> dict[str, Any]:
    """`chats`: how the model writes reasoning and tool calls; None for a model without chats."""
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "pagewire",
        "root": name,
        "parent": None if name == base else base,
        "max_model_len": context_length,
        "chats": chats,
    }
