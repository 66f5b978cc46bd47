"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations, which the gateway has not for models like Whisper.

A form with a file comes in; its text goes out whole, or with `stream` as events, as it is understood.
"""

import json
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any

import grpc
from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.client import CONTENT_TYPES

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FORMATS = ("json", "text", "verbose_json")
REFUSED = ("prompt", "include", "chunking_strategy", "known_speaker_names", "known_speaker_references")
"""Of OpenAI's parameters those that would change the answer, and are not known here."""


class FormError(ValueError):
    """What is wrong with a form, in a sentence."""


@dataclass(frozen=True, slots=True)
class Form:
    """What is asked for: of which model, empty for any, and in which of FORMATS; or as events, if it `streams`."""

    asked: pb.TranscribeRequest
    model: str
    format: str
    streams: bool


async def read_form(request: web.Request) -> Form:
    """Raises FormError."""
    form = await request.post()
    file, name = form.get("file"), str(form.get("response_format", "json"))
    if not isinstance(file, web.FileField):
        raise FormError("file is missing: the form needs a sound file")
    if name not in FORMATS:
        raise FormError(f"response_format is {name[:32]!r}; it must be one of {', '.join(FORMATS)}")
    for parameter in (key.removesuffix("[]") for key, value in form.items() if value != ""):
        if parameter in REFUSED:
            raise FormError(f"{parameter} is not supported here")
    if any(str(part) != "segment" for part in form.getall("timestamp_granularities[]", [])):
        raise FormError("timestamp_granularities is not segment; times of words are not supported here")
    try:
        temperature = float(str(form.get("temperature", "0")))
    except ValueError:
        raise FormError("temperature is not a number") from None
    suffix = "." + file.filename.rpartition(".")[2].lower()
    asked = pb.TranscribeRequest(
        sound=pb.Sound(data=file.file.read(), content_type=CONTENT_TYPES.get(suffix, file.content_type)),
        language=str(form.get("language", "")),
        translate=request.path == PATHS[1],
        temperature=temperature,
    )
    streams = str(form.get("stream", "")).lower() in ("true", "1")
    return Form(asked, str(form.get("model", "")), name, streams)


async def answer(request: web.Request, events: AsyncIterable[Any], form: Form) -> web.StreamResponse:
    """Write what has been understood. Raises grpc.aio.AioRpcError, before anything is written if nothing was understood
    by then."""
    response: web.StreamResponse | None = None
    found: dict[str, Any] = {"task": "translate" if request.path == PATHS[1] else "transcribe", "segments": []}
    text = ""
    async for event in events:
        if event.HasField("language"):
            found["language"] = event.language
        elif event.HasField("end"):
            found["duration"] = event.end.seconds
        else:
            segment = event.segment
            times = {"start": round(segment.start_seconds, 2), "end": round(segment.end_seconds, 2)}
            found["segments"].append({"id": len(found["segments"]), **times, "text": segment.text})
            delta = segment.text if text else segment.text.lstrip()
            text += delta
            if form.streams:
                response = response or await _begin(request)
                await _send(response, {"type": "transcript.text.delta", "delta": delta})
    if form.streams:
        response = response or await _begin(request)
        await _send(response, {"type": "transcript.text.done", "text": text})
        await response.write_eof()
        return response
    if form.format == "text":
        return web.Response(text=text + "\n")
    return web.json_response({"text": text} | (found if form.format == "verbose_json" else {}))


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, event: dict[str, str]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def status_of(error: grpc.aio.AioRpcError) -> tuple[int, str]:
    """Of what the client did wrong; 0 for what was not its doing."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return 400, "invalid_request"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return 404, "not_found"
    return 0, ""
