"""Cohere's /v2/embed: the vectors of texts in one or several forms."""

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.vectors.embeddings import vectors_of
from scheduler_service.frontend.http.vectors.encodings import as_text, in_base64
from scheduler_service.frontend.http.vectors.fields import CohereFields
from scheduler_service.frontend.http.writing import end, write


async def embed(call: Call) -> web.StreamResponse:
    fields = await call.fields(CohereFields)
    if fields.input_type is not None:
        reason = "this server puts no text before inputs, so leave input_type out"
        raise invalid(f"Unsupported input_type {fields.input_type!r}: {reason}", "input_type")
    kinds = dict.fromkeys(fields.embedding_types or ("float",))
    model = await call.model()
    if (fields.output_dimension or model.embedding_size) % 8 and {"binary", "ubinary"} & {*kinds}:
        raise invalid("binary vectors need a number of dimensions that 8 divides", "embedding_types")
    asked = pb.EmbedRequest(
        inputs=[pb.EmbedInput(text=text) for text in fields.texts],
        dimensions=fields.output_dimension or 0,
        truncate=fields.truncate == "END",
        truncate_prompt_tokens=model.context_length if fields.truncate == "START" else None,
        priority=fields.priority,
        lora_name=call.adapter(fields.model, model),
    )
    found, num_tokens = await vectors_of(call, asked)
    units = {"input_tokens": num_tokens, "image_tokens": 0}
    whole: dict[str, Any] = {"id": uuid.uuid4().hex, "texts": fields.texts}
    whole["meta"] = {"api_version": {"version": "2"}, "billed_units": units}

    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(call.request)
    before = json.dumps(whole).encode().removesuffix(b"}") + b', "embeddings": {'
    for kind in kinds:
        before += b'"%b": [' % kind.encode()
        for vector in found:
            await write(response, before + _FORMS[kind](vector))
            await asyncio.sleep(0)  # lets other tasks run
            before = b", "
        before = b"], "
    await write(response, b"]}}")
    await end(response)
    return response


def _signs(vector: bytes | bytearray) -> npt.NDArray[np.uint8]:
    """A bit for each number, which is 1 for numbers above 0, eight to a byte."""
    return np.packbits(np.frombuffer(vector, "<f4") > 0)


_FORMS: dict[str, Callable[[bytearray], bytes]] = {
    "float": as_text,
    "base64": lambda vector: b"".join(in_base64(vector, "float32", "little")),
    "ubinary": lambda vector: json.dumps(_signs(vector).tolist()).encode(),
    "binary": lambda vector: json.dumps((_signs(vector).astype(np.int16) - 128).tolist()).encode(),
}
