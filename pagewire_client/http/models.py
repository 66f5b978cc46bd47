"""OpenAI's /v1/models: the served model, and the adapters that the key may name. The answer has the format of vLLM's
list of models.
"""

import time
from typing import Any

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.http.call import Call
from pagewire_client.http.errors import HttpError

PATH = "/v1/models"
_CREATED = int(time.time())


async def models(call: Call) -> web.StreamResponse:
    """List all models, or the model that the path names."""
    found = await call.stub.GetModel(pb.GetModelRequest(), metadata=call.metadata)
    listed = [_shown(name, call.model, found.context_length) for name in (call.model, *found.lora_names)]
    name = call.request.path.removeprefix(PATH).removeprefix("/")
    if not name:
        return web.json_response({"object": "list", "data": listed})
    for one in listed:
        if one["id"] == name:
            return web.json_response(one)
    raise HttpError(404, "model_not_found", f"there is no model or adapter of this name; the model is {call.model!r}")


def _shown(name: str, base: str, context_length: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "pagewire",
        "root": name,
        "parent": None if name == base else base,
        "max_model_len": context_length,
    }
