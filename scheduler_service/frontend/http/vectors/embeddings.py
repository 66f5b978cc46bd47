"""OpenAI's /v1/embeddings and vLLM's /pooling: the vectors of texts, or of their tokens, in the form asked for."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.body import each_text
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.vectors.encodings import as_text, in_base64, in_type
from scheduler_service.frontend.http.vectors.fields import EmbeddingsFields, PoolingFields, kept_tokens
from scheduler_service.frontend.http.writing import answer_in_parts, end, write
from scheduler_service.frontend.model import ServedModel

MAX_DESCRIBED = 256
"""Texts whose bytes a header can describe: about 100 bytes each, and clients read headers of 64 KiB."""


async def embeddings(call: Call) -> web.StreamResponse:
    fields = await call.fields(EmbeddingsFields)
    return await _answer(call, fields, "embd", "embedding", "embedding")


async def pooling(call: Call) -> web.StreamResponse:
    fields = await call.fields(PoolingFields)
    return await _answer(call, fields, "pooling", "pooling", "data")


async def _answer(call: Call, fields: EmbeddingsFields, prefix: str, kind: str, member: str) -> web.StreamResponse:
    """Answer with vectors. All vectors are stored until the last arrives, because only then the status is known."""
    model = await call.model()
    of_tokens = isinstance(fields, PoolingFields) and fields.task == "token_embed"
    asked = _request(fields, model, call.adapter(fields.model, model), of_tokens=of_tokens)
    if fields.encoding_format == "bytes" and len(asked.inputs) > MAX_DESCRIBED:
        words = f"input has {len(asked.inputs)} texts; the header of encoding_format bytes describes {MAX_DESCRIBED}"
        raise invalid(f"{words}, bytes_only has no header", "encoding_format")
    found, num_tokens = await vectors_of(call, asked)
    size = 4 * (fields.dimensions or model.embedding_size)
    head: dict[str, Any] = {
        "id": f"{prefix}-{fields.request_id or uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": fields.model or model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    if fields.encoding_format in ("bytes", "bytes_only"):
        if fields.encoding_format == "bytes":
            head["data"] = list(_described(found, size, fields, of_tokens=of_tokens))
        return await _in_bytes(call, found, fields, head)

    async def parts() -> AsyncIterator[Iterator[bytes]]:
        for index, vectors in enumerate(found):
            before = f'{{"object":"{kind}","index":{index},"{member}":'.encode()
            shown = _shown(vectors, size, fields, of_tokens=of_tokens)
            yield chain((before,), shown, (b"}",))

    whole = json.dumps({"object": "list"} | head).encode()
    return await answer_in_parts(call.request, whole, b"data", parts())


def _request(fields: EmbeddingsFields, model: ServedModel, adapter: str, *, of_tokens: bool) -> pb.EmbedRequest:
    if fields.encoding_format == "float":
        for name, plain in (("embed_dtype", "float32"), ("endianness", "native")):
            if (given := getattr(fields, name)) != plain:
                raise invalid(f"{name} is {given}, and encoding_format float has numbers as text", name)
    if fields.normalize is not None and fields.use_activation not in (None, fields.normalize):
        raise invalid("normalize and use_activation differ; set one of them", "use_activation")
    return pb.EmbedRequest(
        inputs=map(_input, each_text(fields.input)),
        pooling=pb.POOLING_ALL if of_tokens else pb.POOLING_UNSPECIFIED,
        dimensions=fields.dimensions or 0,
        normalize=fields.use_activation if fields.normalize is None else fields.normalize,
        truncate=fields.truncate,
        truncate_prompt_tokens=kept_tokens(fields.truncate_prompt_tokens, model),
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        lora_name=adapter,
    )


def _input(given: str | list[int]) -> pb.EmbedInput:
    if isinstance(given, str):
        return pb.EmbedInput(text=given)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=given))


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


def _shown(vectors: bytearray, size: int, fields: EmbeddingsFields, *, of_tokens: bool) -> Iterator[bytes]:
    """Yield the vectors of one text as JSON, in pieces: numbers as text have four times their bytes. `size`: bytes of
    a vector.
    """
    if fields.encoding_format == "base64":
        yield from in_base64(vectors, fields.embed_dtype, fields.endianness)
    elif not of_tokens:
        yield as_text(vectors)
    else:
        for start in range(0, len(vectors), size):
            yield (b"," if start else b"[") + as_text(vectors[start : start + size])
        yield b"]"


def _described(
    found: list[bytearray], size: int, fields: EmbeddingsFields, *, of_tokens: bool
) -> Iterator[dict[str, object]]:
    """The description of each text's bytes in the body, in vLLM's form."""
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(fields.embed_dtype, 1)
    end_of_last = 0
    for index, vectors in enumerate(found):
        start, end_of_last = end_of_last, end_of_last + len(vectors) // 4 * width
        yield {
            "index": index,
            "embed_dtype": fields.embed_dtype,
            "endianness": fields.endianness,
            "start": start,
            "end": end_of_last,
            "shape": [len(vectors) // size, size // 4] if of_tokens else [size // 4],
        }


async def _in_bytes(
    call: Call, found: list[bytearray], fields: EmbeddingsFields, head: dict[str, Any]
) -> web.StreamResponse:
    """Answer with the vectors' bytes, one after the other."""
    headers = {"Content-Type": "application/octet-stream"}
    if "data" in head:
        headers["metadata"] = json.dumps(head)
    response = web.StreamResponse(headers=headers)
    await response.prepare(call.request)
    for vectors in found:
        for piece in in_type(vectors, fields.embed_dtype, fields.endianness):
            await write(response, piece)
            await asyncio.sleep(0)
    await end(response)
    return response
