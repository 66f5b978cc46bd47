"""OpenAI's /v1/embeddings, /v1/rerank in the format of Jina, Cohere and vLLM, and vLLM's /v1/score."""

import base64
import json
import sys
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import Field

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.body import MAX_TEXTS, Fields, Number, Part, Priority, Texts, each_text
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.writing import answer_in_parts
from scheduler_service.frontend.model import ServedModel

T = TypeVar("T")
Kept = Annotated[int, Field(ge=-1, lt=1 << 32)]
"""The number of last tokens of a text that are kept. As in vLLM, -1 means as many as the model reads."""


class EmbeddingsFields(Fields):
    """OpenAI's fields, and the fields of pagewire's own protocol."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    normalize: bool | None = None
    truncate: bool = False
    truncate_prompt_tokens: Kept | None = None
    priority: Priority = 0


class Document(Part):
    """A document as an object: only its text is supported."""

    text: str


class RerankFields(Fields):
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, max_length=MAX_TEXTS)]
    top_n: Number | None = None
    return_documents: bool = True
    pair_format: str = ""
    truncate: bool = False
    truncate_prompt_tokens: Kept | None = None
    priority: Priority = 0


class ScoreFields(Fields):
    """`queries` and `documents` are vLLM's newer names of `text_1` and `text_2`."""

    text_1: str | None = None
    text_2: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)] | None = None
    queries: str | None = None
    documents: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)] | None = None
    pair_format: str = ""
    truncate: bool = False
    truncate_prompt_tokens: Kept | None = None
    priority: Priority = 0


async def embeddings(call: Call) -> web.StreamResponse:
    """Answer with vectors. All vectors are stored until the last arrives, because only then the status is known."""
    fields = await call.fields(EmbeddingsFields)
    model = await call.model()
    asked = pb.EmbedRequest(
        inputs=map(_input, each_text(fields.input)),
        dimensions=fields.dimensions or 0,
        normalize=fields.normalize,
        truncate=fields.truncate,
        truncate_prompt_tokens=_kept(fields.truncate_prompt_tokens, model),
        priority=fields.priority,
        lora_name=call.adapter(fields.model, model),
    )
    found, num_tokens = await vectors_of(call, asked)
    whole: dict[str, Any] = {"object": "list", "model": fields.model or model.name}
    whole["usage"] = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    show = _base64 if fields.encoding_format == "base64" else numbers_text

    async def parts() -> AsyncIterator[bytes]:
        for index, vector in enumerate(found):
            yield b'{"object":"embedding","index":%d,"embedding":%b}' % (index, show(bytes(vector)))

    return await answer_in_parts(call.request, json.dumps(whole).encode(), b"data", parts())


async def vectors_of(call: Call, asked: pb.EmbedRequest) -> tuple[list[bytearray], int]:
    """The vectors of all inputs, as little-endian float32, and the number of tokens of the inputs."""
    found = [bytearray() for _ in asked.inputs]
    num_tokens = 0
    async with call.service.embed(asked, call.metadata) as messages:
        async for message in messages:
            call.held.take(len(message.vectors))
            found[message.index] += message.vectors
            num_tokens += message.usage.prompt_tokens
    return found, num_tokens


def _kept(given: int | None, model: ServedModel) -> int | None:
    return model.context_length if given == -1 else given


def _input(given: str | list[int]) -> pb.EmbedInput:
    if isinstance(given, str):
        return pb.EmbedInput(text=given)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=given))


def _base64(vector: bytes) -> bytes:
    return b'"%b"' % base64.b64encode(vector)


def numbers_text(vector: bytes) -> bytes:
    """A vector of little-endian float32 as JSON. Nine digits identify every float32."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"[{','.join(map('{:.9g}'.format, numbers))}]".encode()


async def rerank(call: Call) -> web.StreamResponse:
    fields = await call.fields(RerankFields)
    documents = [one if isinstance(one, str) else one.text for one in fields.documents]
    model = await call.model()
    scored = await _scores(call, fields, model, fields.query, documents, fields.top_n or 0)
    results = [
        {"index": score.index, "relevance_score": score.score}
        | ({"document": {"text": documents[score.index]}} if fields.return_documents else {})
        for score in scored.scores
    ]
    usage = {"total_tokens": scored.usage.prompt_tokens}
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": fields.model or model.name}
    return web.json_response(answer | {"usage": usage, "results": results})


async def score(call: Call) -> web.StreamResponse:
    fields = await call.fields(ScoreFields)
    query = _one_of("text_1", fields.text_1, "queries", fields.queries)
    texts = _one_of("text_2", fields.text_2, "documents", fields.documents)
    documents = [texts] if isinstance(texts, str) else texts
    model = await call.model()
    scored = await _scores(call, fields, model, query, documents, 0)
    data = [
        {"index": one.index, "object": "score", "score": one.score}
        for one in sorted(scored.scores, key=lambda one: one.index)
    ]
    num_tokens = scored.usage.prompt_tokens
    answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "data": data}
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    return web.json_response(answer | {"model": fields.model or model.name, "usage": usage})


def _one_of(name: str, value: T | None, newer: str, same: T | None) -> T:
    """The value of a field that has two names. Raises HttpError unless exactly one name is used."""
    if value is not None and same is None:
        return value
    if value is None and same is not None:
        return same
    raise invalid(f"set either {name} or {newer}", newer)


async def _scores(
    call: Call, fields: RerankFields | ScoreFields, model: ServedModel, query: str, documents: Sequence[str], top_n: int
) -> pb.ScoreResponse:
    asked = pb.ScoreRequest(
        query=query,
        documents=documents,
        top_n=top_n,
        pair_format=fields.pair_format,
        truncate=fields.truncate,
        truncate_prompt_tokens=_kept(fields.truncate_prompt_tokens, model),
        priority=fields.priority,
        lora_name=call.adapter(fields.model, model),
    )
    return await call.service.score(asked, call.metadata)
