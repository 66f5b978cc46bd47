"""vLLM's routes /tokenize and /detokenize."""

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
    fields = await call.fields(TokenizeFields)
    if (fields.prompt is None) is (fields.messages is None):
        raise invalid("set either prompt or messages")
    if fields.messages is None and (fields.tools or fields.chat_template_kwargs or fields.continue_final_message):
        raise invalid("tools, chat_template_kwargs and continue_final_message are for messages")
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
        asked.chat.CopyFrom((await chat_request(chat, model, "", "", call.service)).asked.chat)
    is_chat = fields.messages is not None
    if fields.add_special_tokens is is_chat and await _adds_special_tokens(model):
        reason = (
            "the chat template writes the special tokens" if is_chat else "the model's special tokens are always added"
        )
        raise invalid(f"add_special_tokens is {str(is_chat).lower()}; {reason}", "add_special_tokens")
    with EngineCall(call.service.link) as admitted:
        await admitted.admit_side_call(request_size.get())
        token_ids = list((await encode_prompt(asked, model)).token_ids)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": model.context_length, "tokens": token_ids}
    answer["token_strs"] = None
    if fields.return_token_strs:
        answer["token_strs"] = await require_tokenizer("return_token_strs", model).pieces(token_ids)
    return web.json_response(answer)


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
