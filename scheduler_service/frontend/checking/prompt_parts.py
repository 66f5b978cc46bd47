"""Converts a prompt of several parts to token ids and items. Embeddings are checked on a thread."""

import asyncio
import hashlib

import grpc
import numpy as np

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.prompt_embeds import MAX_BYTES, EmbeddingsHeader, read_embeddings_header
from scheduler_service.access.caller import caller
from scheduler_service.frontend.checking.checks import (
    MAX_PARTS,
    check_context,
    check_length,
    invalid,
    require_tokenizer,
    take_token_ids,
)
from scheduler_service.frontend.checking.prompt_builder import PromptBuilder
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.rendering.encoding_errors import TooManyTokensError

_EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000}
"""The bits of an exponent, which are all set in NaN and infinity."""


async def encode_parts(message: pb.GenerateRequest, model: ServedModel) -> PromptBuilder:
    """Raises RequestError."""
    parts = message.parts.parts
    check_length("parts", len(parts), MAX_PARTS)
    check_combinations(message, "parts")
    if any(part.HasField("prompt_embeds") for part in parts):
        _check_permission(model)
    num_images = sum(part.HasField("image") for part in parts)
    built, num_bytes = PromptBuilder(model, num_images=num_images), 0
    for number, part in enumerate(parts):
        match part.WhichOneof("part"):
            case "text":
                tokenizer = require_tokenizer(f"parts[{number}].text", model)
                most = model.context_length
                if len(part.text) > most * tokenizer.longest_token:
                    invalid(f"parts[{number}].text has {len(part.text)} characters; the context of {most} holds fewer")
                try:
                    encoded = await tokenizer.encode(
                        part.text,
                        most=most,
                        parse_special_tokens=message.parse_special_tokens,
                        begins=not built.token_ids,
                    )
                except TooManyTokensError:
                    invalid(f"parts[{number}].text has more than {most} tokens; the context has {most}")
                built.add_tokens(f"parts[{number}].text", await take_token_ids(encoded))
            case "token_ids":
                check_context(f"parts[{number}].token_ids", len(part.token_ids.ids), model)
                built.add_tokens(f"parts[{number}].token_ids", await take_token_ids(part.token_ids.ids))
            case "prompt_embeds":
                data = part.prompt_embeds
                num_bytes += len(data)
                if num_bytes > MAX_BYTES:
                    invalid(f"prompt_embeds have {num_bytes} bytes or more; at most {MAX_BYTES} are allowed")
                digest, num_embeddings = await asyncio.to_thread(
                    _check_embeddings, f"parts[{number}].prompt_embeds", data, model.prompt_embeds_size
                )
                built.add_item(digest, num_embeddings, data)
            case "image":
                await built.add_image(f"parts[{number}].image", part.image.data)
            case "sound":
                await built.add_sound(f"parts[{number}].sound", part.sound.data)
            case _:
                invalid(f"parts[{number}] is empty; set one of text, token_ids, prompt_embeds, image or sound")
    return built


def check_combinations(message: pb.GenerateRequest, kind: str) -> None:
    """Refuse parameters that are not possible with a prompt of tokens and items. `kind`: the name of the items."""
    if message.sampling.HasField("prompt_logprobs"):
        invalid(f"sampling.prompt_logprobs is not possible with {kind}, because embeddings have no token ids")
    if message.HasField("truncate_prompt_tokens"):
        invalid(f"truncate_prompt_tokens is not possible with {kind}; send fewer {kind}")


def _check_permission(model: ServedModel) -> None:
    if not model.prompt_embeds_size:
        reason = "prompt_embeds: this server runs without --enable-prompt-embeds, or its model reads none"
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, reason)
    if (key := caller.get()) is not None and not key.prompt_embeds:
        raise RequestError(grpc.StatusCode.PERMISSION_DENIED, "this API key may not send prompt_embeds")


def _check_embeddings(name: str, data: bytes, size: int) -> tuple[bytes, int]:
    """The digest of embeddings, and their number. Raises RequestError."""
    try:
        header = read_embeddings_header(data)
    except ValueError as error:
        invalid(f"{name} {error}")
    if header.size != size:
        invalid(f"{name} has embeddings of {header.size} elements; this model's have {size}")
    if not _is_finite(header, data):
        invalid(f"{name} contains NaN or infinity")
    digest = hashlib.sha256(f"embeddings {header.dtype} {header.size} ".encode())
    digest.update(memoryview(data)[header.begin :])
    return digest.digest(), header.num_embeddings


def _is_finite(header: EmbeddingsHeader, data: bytes) -> bool:
    bits = np.frombuffer(data, dtype="<u4" if header.dtype == "F32" else "<u2", offset=header.begin)
    exponent = bits.dtype.type(_EXPONENTS[header.dtype])
    return not np.any((bits & exponent) == exponent)
