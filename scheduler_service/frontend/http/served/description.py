"""The description of the HTTP routes at /openapi.json, in the form of OpenAPI 3.1.

The schema of a body is that of the class that reads it, so the description knows every field.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from aiohttp import web

from scheduler_service.frontend.http.anthropic.fields import CountFields, MessagesFields
from scheduler_service.frontend.http.body import Part
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.ollama import fields as ollama
from scheduler_service.frontend.http.openai.chat_batch import BatchFields
from scheduler_service.frontend.http.openai.chat_fields import ChatFields
from scheduler_service.frontend.http.openai.completion_fields import CompletionFields
from scheduler_service.frontend.http.responses.fields import ResponseFields
from scheduler_service.frontend.http.served import answer_schemas as schemas
from scheduler_service.frontend.http.served.answer_schemas import Schema
from scheduler_service.frontend.http.served.tokens import DetokenizeFields, TokenizeFields
from scheduler_service.frontend.http.vectors import fields as vectors

JSON, EVENTS, LINES, PLAIN = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"


class Operation(NamedTuple):
    """One method of a path. `body`: the class of the JSON body, or None. `stream`: the type of a streamed answer."""

    name: str
    answer: Schema
    body: type[Part] | None = None
    stream: str = ""
    error: Schema = schemas.ERROR
    form: Schema | None = None


_FILE: Schema = {"type": "object", "properties": {"file": schemas.TEXT}, "required": ["file"]}
_SOUND = Operation("transcribe", schemas.TRANSCRIPT, form=_FILE)
OPERATIONS: dict[str, Operation] = {
    "POST /v1/chat/completions": Operation("chat", schemas.CHAT, ChatFields, EVENTS),
    "POST /v1/chat/completions/batch": Operation("chat_batch", schemas.CHAT, BatchFields),
    "POST /v1/completions": Operation("complete", schemas.COMPLETION, CompletionFields, EVENTS),
    "POST /v1/responses": Operation("respond", schemas.RESPONSE, ResponseFields, EVENTS),
    "GET /v1/responses/{response_id}": Operation("show_response", schemas.RESPONSE),
    "DELETE /v1/responses/{response_id}": Operation("delete_response", schemas.RESPONSE_DELETED),
    "GET /v1/responses/{response_id}/input_items": Operation("list_input_items", schemas.RESPONSE_ITEMS),
    "POST /v1/embeddings": Operation("embed", schemas.EMBEDDINGS, vectors.EmbeddingsFields),
    "POST /v2/embed": Operation("cohere_embed", schemas.COHERE_EMBEDDINGS, vectors.CohereFields),
    "POST /pooling": Operation("pool", schemas.POOLED, vectors.PoolingFields),
    "POST /invocations": Operation("invoke", schemas.ANY),
    **{f"POST {path}": Operation(name, schemas.RANKS, vectors.RerankFields)
       for path, name in (("/v1/rerank", "rerank"), ("/v2/rerank", "rerank_v2"), ("/rerank", "rerank_root"))},
    **{f"POST {path}": Operation(name, schemas.SCORES, vectors.ScoreFields)
       for path, name in (("/v1/score", "score"), ("/score", "score_root"))},
    **{f"POST {path}": Operation(name, schemas.TOKENS, TokenizeFields)
       for path, name in (("/tokenize", "tokenize"), ("/v1/tokenize", "tokenize_v1"))},
    **{f"POST {path}": Operation(name, schemas.DETOKENIZED, DetokenizeFields)
       for path, name in (("/detokenize", "detokenize"), ("/v1/detokenize", "detokenize_v1"))},
    "POST /v1/audio/transcriptions": _SOUND,
    "POST /v1/audio/translations": _SOUND._replace(name="translate"),
    "GET /v1/models": Operation("list_models", schemas.MODELS),
    "GET /v1/models/{model}": Operation("show_model", schemas.MODEL),
    "GET /version": Operation("show_version", schemas.VERSION),
    "GET /load": Operation("show_load", schemas.LOAD),
    "GET /tokenizer_info": Operation("show_tokenizer", schemas.TOKENIZER),
    "GET /openapi.json": Operation("describe", schemas.ANY),
    "POST /v1/messages": Operation(
        "message", schemas.ANTHROPIC_MESSAGE, MessagesFields, EVENTS, schemas.ANTHROPIC_ERROR),
    "POST /v1/messages/count_tokens": Operation(
        "count_tokens", schemas.TOKEN_COUNT, CountFields, error=schemas.ANTHROPIC_ERROR),
    "POST /api/chat": Operation("ollama_chat", schemas.OLLAMA_CHAT, ollama.ChatBody, LINES, schemas.OLLAMA_ERROR),
    "POST /api/generate": Operation(
        "ollama_generate", schemas.OLLAMA_TEXT, ollama.GenerateBody, LINES, schemas.OLLAMA_ERROR),
    "POST /api/embed": Operation(
        "ollama_embed", schemas.OLLAMA_EMBEDDINGS, ollama.EmbedBody, error=schemas.OLLAMA_ERROR),
    "POST /api/show": Operation("ollama_show", schemas.OLLAMA_MODEL, ollama.ShowBody, error=schemas.OLLAMA_ERROR),
    "GET /api/tags": Operation("ollama_tags", schemas.OLLAMA_MODELS, error=schemas.OLLAMA_ERROR),
    "GET /api/version": Operation("ollama_version", schemas.VERSION, error=schemas.OLLAMA_ERROR),
}  # fmt: skip


async def show_description(_: Call) -> web.StreamResponse:
    return web.Response(body=_description(), content_type=JSON)


@cache
def _description() -> bytes:
    parts: dict[str, Schema] = {}
    paths: dict[str, dict[str, Any]] = {}
    for name, operation in OPERATIONS.items():
        method, _, path = name.partition(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, parts)
    paths["/metrics"] = {
        "get": {"operationId": "metrics", "responses": _responses({PLAIN: schemas.TEXT}, schemas.ERROR)}
    }
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "pagewire", "version": version("pagewire")},
            "paths": paths,
            "components": {
                "schemas": parts,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    ).encode()


def _operation(path: str, operation: Operation, parts: dict[str, Schema]) -> dict[str, Any]:
    contents = {JSON: operation.answer} | ({operation.stream: schemas.TEXT} if operation.stream else {})
    found: dict[str, Any] = {"operationId": operation.name, "responses": _responses(contents, operation.error)}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schemas.TEXT} for name in names]
    if operation.body is not None:
        found["requestBody"] = _body(JSON, _fields(operation.body, parts))
    elif operation.form is not None:
        found["requestBody"] = _body("multipart/form-data", operation.form)
    return found


def _fields(body: type[Part], parts: dict[str, Schema]) -> Schema:
    """A reference to the schema of a body. Two APIs may have classes of one name."""
    name = f"{body.__module__.split('.')[-2].title()}{body.__name__}"
    schema = body.model_json_schema(ref_template=f"#/components/schemas/{name}{{model}}")
    for part, definition in schema.pop("$defs", {}).items():
        parts[f"{name}{part}"] = definition
    parts[name] = schema
    return {"$ref": f"#/components/schemas/{name}"}


def _body(content_type: str, schema: Schema) -> dict[str, Any]:
    return {"required": True, "content": {content_type: {"schema": schema}}}


def _responses(contents: Mapping[str, Schema], error: Schema) -> dict[str, Any]:
    answer = {"description": "the answer", "content": {kind: {"schema": schema} for kind, schema in contents.items()}}
    return {"200": answer, "default": {"description": "the error", "content": {JSON: {"schema": error}}}}
