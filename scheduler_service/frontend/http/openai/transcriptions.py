"""OpenAI's /v1/audio/transcriptions and /v1/audio/translations.

The request is a multipart form that contains a sound file. The answer is the whole recognised text. With `stream` the
answer is a stream of events, which are sent while the text is recognised.
"""

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.http.body import check_length
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import HttpError, invalid, refused_by
from scheduler_service.frontend.http.writing import begin_events, end, write

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
KNOWN = ("file", "language", "model", "prompt", "response_format", "stream", "temperature")
GRANULARITY = "timestamp_granularities"
GRANULARITIES = frozenset(("segment", "word"))
_STREAMS = {"": False, "0": False, "1": True, "false": False, "true": True}
FRAMES_PER_SECOND = 100
"""Feature frames per second of sound. OpenAI's `seek` counts frames."""
MAX_PARTS = 32
MAX_TEXT_BYTES = 1 << 18
"""Maximum size in bytes of a part of the form that is not a file."""


@dataclass(frozen=True, slots=True)
class Form:
    """A parsed request. The answer has one of FORMATS. If `streams` is set, the answer is a stream of events."""

    asked: pb.TranscribeRequest
    format: str
    streams: bool
    granularities: frozenset[str]
    """The members of GRANULARITIES that a verbose_json answer contains."""


async def _read_form(call: Call, *, translates: bool) -> Form:
    """Read and check the multipart form. Raises HttpError."""
    parts, granularities, sound = await _read_parts(call)
    name = parts.get("response_format", "json")
    if sound is None:
        raise invalid("file is missing: the form needs a sound file")
    if name not in FORMATS:
        raise invalid(f"response_format is {name[:32]!r}; it must be one of {', '.join(FORMATS)}")
    if unknown := granularities - GRANULARITIES:
        raise invalid(f"timestamp_granularities is {min(unknown)[:32]!r}; it may be word, segment or both")
    if "word" in granularities and name != "verbose_json":
        raise invalid(f"timestamp_granularities is 'word', and response_format {name!r}; verbose_json has words")
    streams = _STREAMS.get(parts.get("stream", "").lower())
    if streams is None:
        raise invalid("stream is neither true nor false")
    if streams and name not in ("json", "text"):
        raise invalid(f"stream gives events, and no {name}")
    try:
        temperature = float(parts.get("temperature", "0"))
    except ValueError:
        raise invalid("temperature is not a number") from None
    asked = pb.TranscribeRequest(
        sound=pb.Sound(data=bytes(sound)),
        language=parts.get("language", ""),
        prompt=parts.get("prompt", ""),
        translate=translates,
        temperature=temperature,
        scores=name == "verbose_json",
        words="word" in granularities,
        lora_name=call.adapter(parts.get("model", ""), await call.model()),
    )
    return Form(asked, name, streams, granularities or frozenset(("segment",)))


async def _read_parts(call: Call) -> tuple[dict[str, str], frozenset[str], bytearray | None]:
    """Read the multipart form: its texts by name, the values of `timestamp_granularities`, and the sound file. The file
    requires neither a name nor a content type.

    Raises HttpError.
    """
    check_length(call.request, call.most_sound_bytes)
    if not call.request.content_type.startswith("multipart/"):
        raise invalid("file is missing: the form needs a sound file, as multipart/form-data")
    texts: dict[str, str] = {}
    granularities: set[str] = set()
    sound: bytearray | None = None
    try:
        async with asyncio.timeout(call.receive_seconds):
            reader = await call.request.multipart()
            for _ in range(MAX_PARTS + 1):
                if (part := await reader.next()) is None:
                    return texts, frozenset(granularities), sound
                if not isinstance(part, aiohttp.BodyPartReader):
                    raise invalid("the form has a form in it")
                parameter = (part.name or "").removesuffix("[]")
                is_file = parameter == "file"
                content = bytearray()
                while piece := await part.read_chunk(1 << 16):
                    call.held.take(len(piece))
                    content += piece
                    if len(content) > (call.most_sound_bytes if is_file else MAX_TEXT_BYTES):
                        raise HttpError(413, "too_large", f"{part.name} is too large")
                if parameter == GRANULARITY:
                    granularities.add(content.decode())
                    continue
                is_twice = sound is not None if is_file else texts.get(parameter, content.decode()) != content.decode()
                if is_twice:
                    raise invalid(f"{parameter[:64]} is given twice")
                if is_file:
                    sound = content
                elif parameter in KNOWN:
                    texts[parameter] = content.decode()
                elif content:
                    raise invalid(f"{parameter[:64]} is not supported here")
    except TimeoutError:
        raise HttpError(408, "timeout", f"the form did not come within {call.receive_seconds:g} s") from None
    except (ValueError, LookupError, RuntimeError, AssertionError, HttpProcessingError, web.HTTPException):
        raise invalid("the body is no form of multipart/form-data in UTF-8") from None
    raise invalid(f"the form has more than {MAX_PARTS} parts")


async def transcribe(call: Call) -> web.StreamResponse:
    return await _transcribe(call, translates=False)


async def translate(call: Call) -> web.StreamResponse:
    return await _transcribe(call, translates=True)


async def _transcribe(call: Call, *, translates: bool) -> web.StreamResponse:
    """Answer with the whole text, or with a stream of events. An error after the stream's first event becomes the
    stream's last event.
    """
    form = await _read_form(call, translates=translates)
    response: web.StreamResponse | None = None
    found: dict[str, Any] = {"task": "translate" if translates else "transcribe", "segments": [], "words": []}
    text = ""
    try:
        async with call.service.transcribe(form.asked, call.metadata) as events:
            async for event in events:
                if event.HasField("language"):
                    found["language"] = event.language
                elif event.HasField("end"):
                    found["duration"] = event.end.seconds
                else:
                    segment = event.segment
                    found["segments"].append(_segment(segment, len(found["segments"]), form.asked.temperature))
                    found["words"] += _words(segment)
                    delta = segment.text if text else segment.text.lstrip()
                    text += delta
                    if form.streams:
                        response = response or await begin_events(call.request)
                        await _send(response, {"type": "transcript.text.delta", "delta": delta})
    except RequestError as error:
        if response is None:
            raise
        await _send(response, refused_by(error).body)
        await end(response)
        return response
    if form.streams:
        response = response or await begin_events(call.request)
        await _send(response, {"type": "transcript.text.done", "text": text})
        await end(response)
        return response
    if form.format == "text":
        return web.Response(text=text + "\n")
    if form.format in ("srt", "vtt"):
        return web.Response(text=_subtitles(found["segments"], is_vtt=form.format == "vtt"))
    if form.format == "json":
        return web.json_response({"text": text})
    hidden = {f"{name}s" for name in GRANULARITIES - form.granularities}
    return web.json_response({"text": text} | {name: value for name, value in found.items() if name not in hidden})


def _segment(segment: pb.TranscriptSegment, number: int, temperature: float) -> dict[str, Any]:
    """A transcribed segment with all JSON members that OpenAI's API has. A member is null if the model does not provide
    its value.
    """
    text = segment.text.encode()
    return {
        "id": number,
        "seek": round(segment.window_start_seconds * FRAMES_PER_SECOND),
        "start": round(segment.start_seconds, 2),
        "end": round(segment.end_seconds, 2),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": temperature,
        "avg_logprob": segment.mean_logprob if segment.HasField("mean_logprob") else None,
        "compression_ratio": len(text) / len(zlib.compress(text)),
        "no_speech_prob": segment.no_speech_probability if segment.HasField("no_speech_probability") else None,
    }


def _words(segment: pb.TranscriptSegment) -> list[dict[str, Any]]:
    return [
        {"word": word.text.strip(), "start": round(word.start_seconds, 2), "end": round(word.end_seconds, 2)}
        for word in segment.words
        if word.text.strip()
    ]


def _subtitles(segments: Sequence[dict[str, Any]], *, is_vtt: bool) -> str:
    """SubRip or WebVTT subtitles. WebVTT has a header line, and writes a point before milliseconds where SubRip writes
    a comma.
    """
    mark = "." if is_vtt else ","
    cues = [f"{_time(one['start'], mark)} --> {_time(one['end'], mark)}\n{_line(one['text'])}\n\n" for one in segments]
    if is_vtt:
        return "WEBVTT\n\n" + "".join(cues)
    return "".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1))


def _line(text: str) -> str:
    """Put the text on one line, and remove marks that would parse as times."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, mark: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{milliseconds:03}"


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await write(response, f"data: {json.dumps(event)}\n\n".encode())
