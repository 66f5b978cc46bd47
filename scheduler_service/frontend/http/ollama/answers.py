"""Ollama's /api/chat and /api/generate as lines of JSON or one object, its vectors, and its routes about models."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.chat.events import CallArguments, CallEnded, CallStarted, Content, Event, Reasoning
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.chats.call_object import CallObject
from scheduler_service.frontend.http.chats.chat_answers import ChatDelta
from scheduler_service.frontend.http.chats.thinking import can_think
from scheduler_service.frontend.http.errors import HttpError, failed, invalid
from scheduler_service.frontend.http.ollama.fields import (
    ChatBody,
    EmbedBody,
    GenerateBody,
    ShowBody,
    TextFields,
    adapter_of,
    chat_fields,
    read_options,
)
from scheduler_service.frontend.http.openai.chat import TOKEN_BYTES
from scheduler_service.frontend.http.openai.chat_choice import new_call_id
from scheduler_service.frontend.http.openai.chat_request import chat_request
from scheduler_service.frontend.http.vectors.embeddings import vectors_of
from scheduler_service.frontend.http.vectors.encodings import as_text
from scheduler_service.frontend.http.writing import answer_in_parts, begin_lines, end, write
from scheduler_service.frontend.model import ServedModel

VERSION = "0.13.0"
"""The version of Ollama whose API this server follows. Clients compare it with the version that they need."""
_SINCE = datetime.now(UTC).isoformat()
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


async def chat(call: Call) -> web.StreamResponse:
    fields = await call.fields(ChatBody, takes_images=True)
    model = await call.model()
    answer = _Answer(call, fields, model, is_chat=True)
    return await answer.send(fields.messages, fields.tools)


async def generate(call: Call) -> web.StreamResponse:
    fields = await call.fields(GenerateBody, takes_images=True)
    model = await call.model()
    answer = _Answer(call, fields, model, is_chat=False)
    if not fields.prompt and not fields.images:
        return await answer.send([])
    if fields.images and not model.reads_images:
        raise invalid(f"images is set, and this model reads {model.reads}", "images")
    if fields.raw and fields.images:
        raise invalid("images cannot be combined with raw, because raw uses no chat template", "images")
    if fields.raw and fields.system is not None:
        raise invalid("system cannot be combined with raw, because raw uses no chat template", "system")
    if fields.raw:
        return await answer.send([{"role": "user", "content": ""}], raw=fields.prompt)
    system = [] if fields.system is None else [{"role": "system", "content": fields.system}]
    said = {"role": "user", "content": fields.prompt, "images": fields.images}
    fields.images = None
    return await answer.send([*system, said])


class _Answer:
    """One answer. `is_chat`: the answer is a message, otherwise a text."""

    def __init__(self, call: Call, fields: TextFields, model: ServedModel, *, is_chat: bool) -> None:
        self._call, self._fields, self._model, self._is_chat = call, fields, model, is_chat
        self._base, self._began, self._first = uuid.uuid4().hex, time.monotonic_ns(), 0
        self._response: web.StreamResponse | None = None
        self._calls: list[tuple[CallStarted, CallObject]] = []
        self._num_tokens, self._call_id = 0, ""

    async def send(
        self, messages: list[dict[str, Any]], tools: Any = None, *, raw: str | None = None
    ) -> web.StreamResponse:
        """Answer messages, or the text `raw` as it stands. Without messages, a client asks to load the model."""
        fields, model, service = self._fields, self._model, self._call.service
        adapter = adapter_of(self._call, fields.model, model)
        if not messages:
            return web.json_response(self._shown({"content": ""}) | {"done": True, "done_reason": "load"})
        chat = await chat_fields(fields, messages, tools, model, is_chat=self._is_chat)
        name, images = f"ollama-{self._base}", self._call.images(model)
        request = await chat_request(chat, model, adapter, name, service, images, fits_max_tokens=True)
        if raw is not None:
            request.asked.text = raw
            request.asked.parse_special_tokens = True  # the client has applied a template of its own
        self._call_id = request.syntax.call_id
        try:
            async with service.chat(request, self._call.metadata) as deltas:
                ended = await self._read_all(deltas)
        except (RequestError, HttpError) as error:
            if self._response is None:
                raise
            ended = {"error": str(error)}
        if self._response is None:
            return web.json_response(ended)
        await self._line(ended)
        await end(self._response)
        return self._response

    async def _read_all(self, deltas: AsyncIterator[ChatDelta]) -> dict[str, Any]:
        """Read an output, and write its lines if they are asked for. Returns the last line, or the whole answer."""
        whole: dict[str, Any] = {"content": ""}
        num_prompt_tokens, reason = 0, ""
        async for delta in deltas:
            message, num_prompt_tokens = delta.message, delta.num_prompt_tokens
            self._first = self._first or time.monotonic_ns()
            self._num_tokens += len(message.token_ids)
            if message.finish_reason and not (reason := _REASONS.get(message.finish_reason, "")):
                raise failed(message.error)
            parts: dict[str, Any] = {}
            for event in delta.events:
                _merge(parts, self._read(event))
            if not self._fields.stream:
                self._call.held.take(len(message.text) + TOKEN_BYTES * len(message.token_ids))
                _merge(whole, parts)
                continue
            if self._response is None:
                self._response = await begin_lines(self._call.request)
            if parts:
                await self._line(self._shown({"content": ""} | parts) | {"done": False})
        return self._shown(whole) | {"done": True, "done_reason": reason} | self._figures(num_prompt_tokens)

    def _read(self, event: Event) -> dict[str, Any]:
        """The parts of the message that an event completes."""
        match event:
            case Reasoning(text):
                return {"thinking": text}
            case Content(text):
                return {"content": text}
            case CallStarted():
                self._calls.append((event, CallObject()))
            case CallArguments(index, text):
                self._calls[index][1].add(text)
            case CallEnded(index):
                started, arguments = self._calls[index]
                call_id = started.id or new_call_id("call_", self._base, f"{index:05x}", self._call_id)
                function = {"index": index, "name": started.name, "arguments": arguments.value()}
                return {"tool_calls": [{"id": call_id, "function": function}]}
        return {}

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self._fields.model, "created_at": created}
        if self._is_chat:
            return head | {"message": {"role": "assistant"} | message}
        return head | {"response": message.pop("content")} | message

    def _figures(self, num_prompt_tokens: int) -> dict[str, int]:
        """Counts of tokens, and times in nanoseconds."""
        now = time.monotonic_ns()
        return {
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": num_prompt_tokens,
            "prompt_eval_duration": self._first - self._began,
            "eval_count": self._num_tokens,
            "eval_duration": now - self._first,
        }

    async def _line(self, shown: dict[str, Any]) -> None:
        assert self._response is not None
        await write(self._response, f"{json.dumps(shown)}\n".encode())


def _merge(whole: dict[str, Any], parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        whole[name] = whole[name] + part if name in whole else part


async def show_version(_: Call) -> web.StreamResponse:
    return web.json_response({"version": VERSION})


async def tags(call: Call) -> web.StreamResponse:
    found, model = await call.service.get_model(call.metadata), await call.model()
    listed = [
        {"name": name, "model": name, "modified_at": _SINCE, "size": 0}
        | {"digest": found.fingerprint, "details": _details(model)}
        for name in (found.name, *found.lora_names)
    ]
    return web.json_response({"models": listed})


async def show(call: Call) -> web.StreamResponse:
    fields = await call.fields(ShowBody)
    found, model = await call.service.get_model(call.metadata), await call.model()
    adapter_of(call, fields.model, model)
    details = _details(model)
    family, is_text = details["family"], "generate" in found.tasks
    able = {"completion": is_text, "tools": is_text and found.has_chat_template, "thinking": can_think(model)}
    able["vision"] = model.reads_images
    able["embedding"] = "embed" in found.tasks
    sizes = {"context_length": found.context_length, "embedding_length": found.embedding_size}
    shown = {
        "modelfile": "",
        "parameters": "",
        "modified_at": _SINCE,
        "details": details,
        "template": model.tokenizer.chat_template if model.tokenizer is not None else "",
        "model_info": {"general.architecture": family} | {f"{family}.{name}": size for name, size in sizes.items()},
        "capabilities": [name for name, is_able in able.items() if is_able],
    }
    return web.json_response(shown)


def _details(model: ServedModel) -> dict[str, Any]:
    family = model.chat_syntax.family if model.chat_syntax is not None else "pagewire"
    sizes = {"parameter_size": "", "quantization_level": model.dtype}
    return {"parent_model": "", "format": "safetensors", "family": family, "families": [family]} | sizes


async def embed(call: Call) -> web.StreamResponse:
    fields, began = await call.fields(EmbedBody), time.monotonic_ns()
    read_options(fields.options or {})
    model = await call.model()
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    asked = pb.EmbedRequest(
        inputs=[pb.EmbedInput(text=text) for text in texts],
        dimensions=fields.dimensions or 0,
        normalize=True,
        truncate=fields.truncate,
        lora_name=adapter_of(call, fields.model, model),
    )
    found, num_tokens = await vectors_of(call, asked)
    shown = {"model": fields.model, "prompt_eval_count": num_tokens, "load_duration": 0}
    shown["total_duration"] = time.monotonic_ns() - began

    async def parts() -> AsyncIterator[bytes]:
        for vector in found:
            yield as_text(bytes(vector))

    return await answer_in_parts(call.request, json.dumps(shown).encode(), b"embeddings", parts())
