"""vLLM's routes /tokenize and /detokenize."""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.request_limits import request_size
from scheduler_service.frontend.checking.checks import require_tokenizer
from scheduler_service.frontend.checking.prompt import MAX_DETOKENIZE, decode_tokens, encode_prompt
from scheduler_service.frontend.http.body import Fields, Number
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.openai.chat_fields import ChatFields, ToolField
from scheduler_service.frontend.http.openai.chat_request import chat_request
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.model import ServedModel

VALUES_A_TURN = 8192
"""Values that become JSON in one turn of the event loop, in 2 ms."""


class TokenizeFields(Fields):
    """Either `prompt` or `messages`. `return_token_strs`: the answer has each token as the vocabulary spells it."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolField], Field(fail_fast=True, max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    tokens: Annotated[list[Number], Field(fail_fast=True, max_length=MAX_DETOKENIZE)]


async def tokenize(call: Call) -> web.StreamResponse:
    fields = await call.fields(TokenizeFields, takes_images=True)
    if (fields.prompt is None) is (fields.messages is None):
        raise invalid("set either prompt or messages")
    for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        if fields.messages is None and getattr(fields, name) not in (None, False, [], {}):
            raise invalid(f"{name} is for messages, and prompt is a text", name)
    model = await call.model()
    call.adapter(fields.model, model)
    asked = pb.TokenizeRequest(parse_special_tokens=fields.parse_special_tokens)
    if fields.messages is None:
        asked.text = fields.prompt or ""
    else:
        chat = ChatFields(
            messages=fields.messages,
            tools=fields.tools,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template_kwargs=fields.chat_template_kwargs,
        )
        request = await chat_request(chat, model, "", "", call.service, call.images(model))
        asked.chat.CopyFrom(request.asked.chat)
    is_chat = fields.messages is not None
    if fields.add_special_tokens is is_chat and await _adds_special_tokens(model):
        reason = (
            "the chat template writes the special tokens" if is_chat else "the model's special tokens are always added"
        )
        raise invalid(f"add_special_tokens is {str(is_chat).lower()}; {reason}", "add_special_tokens")
    with EngineCall(call.service.link) as admitted:
        await admitted.admit_side_call(request_size.get())
        token_ids = list((await encode_prompt(asked, model)).token_ids)
    spelled = "null"
    if fields.return_token_strs:
        spelled = await _in_json(await require_tokenizer("return_token_strs", model).pieces(token_ids))
    head = json.dumps({"count": len(token_ids), "max_model_len": model.context_length})
    text = f'{head[:-1]}, "tokens": {await _in_json(token_ids)}, "token_strs": {spelled}}}'
    return web.Response(text=text, content_type="application/json")


async def _in_json(values: Sequence[int | str]) -> str:
    """A list as JSON, made in turns of the event loop: 131,072 tokens with their texts take 40 ms."""
    pieces: list[str] = []
    for start in range(0, len(values), VALUES_A_TURN):
        pieces.append(json.dumps(values[start : start + VALUES_A_TURN])[1:-1])
        await asyncio.sleep(0)  # lets other tasks run
    return f"[{', '.join(pieces)}]"


async def _adds_special_tokens(model: ServedModel) -> bool:
    """Whether the tokenizer adds special tokens to a text."""
    tokenizer = require_tokenizer("add_special_tokens", model)
    return len(await tokenizer.encode("", most=MAX_DETOKENIZE, parse_special_tokens=False, aside=True)) > 0


async def detokenize(call: Call) -> web.StreamResponse:
    fields = await call.fields(DetokenizeFields)
    model = await call.model()
    call.adapter(fields.model, model)
    with EngineCall(call.service.link) as admitted:
        await admitted.admit_side_call(request_size.get())
        asked = pb.DetokenizeRequest(token_ids=fields.tokens, skip_special_tokens=False)
        return web.json_response({"prompt": (await decode_tokens(asked, model)).text})
