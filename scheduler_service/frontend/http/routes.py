"""The table of routes, and the conventions of the API that a path belongs to."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from scheduler_service.frontend.http.anthropic.errors import error_body
from scheduler_service.frontend.http.anthropic.messages import count_tokens, messages
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import HttpError
from scheduler_service.frontend.http.ollama import answers as ollama
from scheduler_service.frontend.http.openai.chat import chat
from scheduler_service.frontend.http.openai.chat_batch import chat_batch
from scheduler_service.frontend.http.openai.completions import complete
from scheduler_service.frontend.http.openai.transcriptions import transcribe, translate
from scheduler_service.frontend.http.responses.create import create_response
from scheduler_service.frontend.http.responses.stored_routes import delete_response, list_input, show_response
from scheduler_service.frontend.http.served.description import show_description
from scheduler_service.frontend.http.served.invocations import invoke
from scheduler_service.frontend.http.served.models import models
from scheduler_service.frontend.http.served.status import show_load, show_metrics, show_tokenizer, show_version
from scheduler_service.frontend.http.served.tokens import detokenize, tokenize
from scheduler_service.frontend.http.vectors import cohere
from scheduler_service.frontend.http.vectors.embeddings import embeddings, pooling
from scheduler_service.frontend.http.vectors.scores import rerank, score

Route = Callable[[Call], Awaitable[web.StreamResponse]]

ROUTES: dict[str, Route] = {
    "POST /v1/chat/completions": chat,
    "POST /v1/chat/completions/batch": chat_batch,
    "POST /v1/completions": complete,
    "POST /v1/responses": create_response,
    "POST /v1/embeddings": embeddings,
    "POST /v2/embed": cohere.embed,
    "POST /pooling": pooling,
    "POST /invocations": invoke,
    **dict.fromkeys(("POST /v1/rerank", "POST /v2/rerank", "POST /rerank"), rerank),
    **dict.fromkeys(("POST /v1/score", "POST /score"), score),
    **dict.fromkeys(("POST /tokenize", "POST /v1/tokenize"), tokenize),
    **dict.fromkeys(("POST /detokenize", "POST /v1/detokenize"), detokenize),
    "GET /version": show_version,
    "GET /load": show_load,
    "GET /metrics": show_metrics,
    "GET /tokenizer_info": show_tokenizer,
    "GET /openapi.json": show_description,
    "POST /v1/audio/transcriptions": transcribe,
    "POST /v1/audio/translations": translate,
    "POST /v1/messages": messages,
    "POST /v1/messages/count_tokens": count_tokens,
    "POST /api/chat": ollama.chat,
    "POST /api/generate": ollama.generate,
    "POST /api/embed": ollama.embed,
    "POST /api/show": ollama.show,
    "GET /api/tags": ollama.tags,
    "GET /api/version": ollama.show_version,
}
RESUMABLE = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
"""Paths whose streams a client can resume."""
_MODELS = re.compile(r"/v1/models(/.+)?")
_RESPONSE = re.compile(r"/v1/responses/[^/]+(/input_items)?")


def find_route(method: str, path: str) -> Route | None:
    """The route of a request; None if there is none."""
    if method in ("GET", "HEAD") and _MODELS.fullmatch(path):
        return models
    if found := _RESPONSE.fullmatch(path):
        if method == "DELETE" and not found[1]:
            return delete_response
        return (list_input if found[1] else show_response) if method in ("GET", "HEAD") else None
    return ROUTES.get(f"{'GET' if method == 'HEAD' else method} {path}")


@dataclass(frozen=True, slots=True)
class Api:
    """The conventions of an API. `error_body`: the JSON of an error, which may have the request's name.

    `id_header`: the header with the name that the server gives to each request; "" if requests get no names.
    """

    error_body: Callable[[HttpError, str], dict[str, Any]]
    id_header: str = ""


OPENAI = Api(lambda error, _: error.body)
_ANTHROPIC = Api(error_body, "Request-Id")
_OLLAMA = Api(lambda error, _: {"error": str(error)})


def find_api(path: str) -> Api:
    """The API that a path belongs to, also if the path is not served."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return _ANTHROPIC
    return _OLLAMA if path.startswith("/api/") else OPENAI
