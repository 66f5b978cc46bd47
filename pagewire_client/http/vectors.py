"""OpenAI's /v1/embeddings, /v1/rerank in the format of Jina, Cohere and vLLM, and vLLM's /v1/score.

These routes bypass the gateway: it supports neither scores nor `dimensions`, and it joins a list of texts into one
text.
"""

import base64
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.embedding import Embedding
from pagewire_client.http.call import MAX_TEXTS, Call, Fields, Number, Priority, Texts, answer_in_parts, each_text


class EmbeddingsFields(Fields):
    """OpenAI's fields, and the fields `normalize`, `truncate` and `priority` of pagewire's own protocol."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Number | None = None
    normalize: bool | None = None
    truncate: bool = False
    priority: Priority = 0


class Document(BaseModel):
    """A document's text. All fields of a document except its text are ignored."""

    text: str


class RerankFields(Fields):
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, max_length=MAX_TEXTS)]
    top_n: Number | None = None
    return_documents: bool = True
    pair_format: str = ""
    truncate: bool = False
    priority: Priority = 0


class ScoreFields(Fields):
    text_1: str
    text_2: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)]
    pair_format: str = ""
    truncate: bool = False
    priority: Priority = 0


async def embeddings(call: Call) -> web.StreamResponse:
    """Answer with vectors. All vectors are stored until the last vector arrives, because the answer's status is known
    only after the last vector.
    """
    fields = await call.fields(EmbeddingsFields)
    asked = pb.EmbedRequest(
        inputs=map(_input, each_text(fields.input)),
        dimensions=fields.dimensions or 0,
        normalize=fields.normalize,
        truncate=fields.truncate,
        priority=fields.priority,
        lora_name=call.adapter(fields.model),
    )
    found = [Embedding() for _ in asked.inputs]
    messages = call.stub.Embed(asked, metadata=call.metadata)
    try:
        async for message in messages:
            call.held.take(len(message.vectors))
            found[message.index].add(message)
    finally:
        messages.cancel()
    num_tokens = sum(embedding.usage.prompt_tokens for embedding in found)
    whole: dict[str, Any] = {"object": "list", "model": fields.model or call.model}
    whole["usage"] = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    show = _base64 if fields.encoding_format == "base64" else _numbers

    async def parts() -> AsyncIterator[bytes]:
        for index, embedding in enumerate(found):
            yield b'{"object":"embedding","index":%d,"embedding":%b}' % (index, show(embedding))

    return await answer_in_parts(call.request, json.dumps(whole).encode(), b"data", parts())


def _input(given: str | list[int]) -> pb.EmbedInput:
    if isinstance(given, str):
        return pb.EmbedInput(text=given)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=given))


def _base64(embedding: Embedding) -> bytes:
    return b'"%b"' % base64.b64encode(embedding.data)


def _numbers(embedding: Embedding) -> bytes:
    """A vector as JSON. Numbers are written with nine digits, because nine digits identify every float32."""
    return f"[{','.join(map('{:.9g}'.format, embedding.vector))}]".encode()


async def rerank(call: Call) -> web.StreamResponse:
    fields = await call.fields(RerankFields)
    documents = [one if isinstance(one, str) else one.text for one in fields.documents]
    scored = await _scores(call, fields, fields.query, documents, fields.top_n or 0)
    results = [
        {"index": score.index, "relevance_score": score.score}
        | ({"document": {"text": documents[score.index]}} if fields.return_documents else {})
        for score in scored.scores
    ]
    usage = {"total_tokens": scored.usage.prompt_tokens}
    model = fields.model or call.model
    return web.json_response({"id": f"rerank-{uuid.uuid4().hex}", "model": model, "usage": usage, "results": results})


async def score(call: Call) -> web.StreamResponse:
    fields = await call.fields(ScoreFields)
    documents = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    scored = await _scores(call, fields, fields.text_1, documents, 0)
    data = [
        {"index": one.index, "object": "score", "score": one.score}
        for one in sorted(scored.scores, key=lambda one: one.index)
    ]
    num_tokens = scored.usage.prompt_tokens
    answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "data": data}
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    return web.json_response(answer | {"model": fields.model or call.model, "usage": usage})


async def _scores(
    call: Call, fields: RerankFields | ScoreFields, query: str, documents: list[str], top_n: int
) -> pb.ScoreResponse:
    asked = pb.ScoreRequest(
        query=query,
        documents=documents,
        top_n=top_n,
        pair_format=fields.pair_format,
        truncate=fields.truncate,
        priority=fields.priority,
        lora_name=call.adapter(fields.model),
    )
    scored: pb.ScoreResponse = await call.stub.Score(asked, metadata=call.metadata)
    return scored
