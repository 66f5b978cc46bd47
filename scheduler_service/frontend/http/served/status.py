"""Routes about the server itself."""

from importlib.metadata import version

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from scheduler_service.access.audit import leave_own_line
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import HttpError


async def show_version(_: Call) -> web.StreamResponse:
    return web.json_response({"version": version("pagewire")})


async def show_load(call: Call) -> web.StreamResponse:
    """The number of requests in flight in this front end, in vLLM's form."""
    return web.json_response({"server_load": len(call.service.link.requests.by_call)})


async def show_metrics(call: Call) -> web.StreamResponse:
    """The engine's metrics, as at --metrics-listen."""
    key = call.request.headers.get("X-Api-Key", "")
    text = await call.service.link.metrics(call.request.headers.get("Authorization", f"Bearer {key}"))
    leave_own_line()  # a scrape every few seconds would hide the lines of requests
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def show_tokenizer(call: Call) -> web.StreamResponse:
    """The tokenizer's settings that clients may need, named as in tokenizer_config.json."""
    model = await call.model()
    if (tokenizer := model.tokenizer) is None:
        raise HttpError(501, "not_implemented", "the served model has no tokenizer")
    return web.json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the class that reads tokenizer.json
            "model_max_length": model.context_length,
            "vocabulary_size": model.vocabulary_size,
            "chat_template": tokenizer.chat_template or None,
            "all_special_tokens": sorted(tokenizer.special_tokens),
            "eos_token_ids": sorted(model.eos_token_ids),
        }
    )
