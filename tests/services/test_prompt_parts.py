"""Prompts of several parts are read in order, and what is wrong in a part is said in a sentence before it is used."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import PromptEmbeds
from pagewire_common.calls.errors import RequestError
from pagewire_common.prompt_embeds import MAX_BYTES
from scheduler_service.core.groups.prompt_item import PLACEHOLDER
from scheduler_service.frontend.calls.generation import check_request
from scheduler_service.frontend.model import ServedModel

EMBEDS = PromptEmbeds.of(np.ones((3, 8), dtype=np.float32)).data


def request(*parts: str | list[int] | bytes, **fields: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    for part in parts:
        match part:
            case str():
                message.parts.parts.add(text=part)
            case bytes():
                message.parts.parts.add(prompt_embeds=part)
            case _:
                message.parts.parts.add(token_ids=pb.TokenIds(ids=part))
    return message


@pytest.fixture
def model(byte_model: ServedModel) -> ServedModel:
    return replace(byte_model, prompt_embeds_size=8)


async def test_parts_follow_each_other_and_items_name_their_places(model: ServedModel) -> None:
    checked = await check_request(request("hi", EMBEDS, [70, 71], EMBEDS[:-1] + b"\1"), "a", model)
    text = list((await check_request(pb.GenerateRequest(text="hi"), "a", model)).prompt_token_ids)
    hole = [PLACEHOLDER] * 3
    assert list(checked.prompt_token_ids) == [*text, *hole, 70, 71, *hole]
    first, second = checked.items
    assert (first.start, first.stop, first.data) == (2, 5, EMBEDS)
    assert (second.start, second.stop, second.num_bytes) == (7, 10, len(EMBEDS))
    assert first.digest != second.digest


async def test_digests_depend_on_types_and_numbers_and_not_on_a_tensors_name(model: ServedModel) -> None:
    ones = np.ones((2, 8), dtype=np.float32)
    halves = np.frombuffer(ones.tobytes(), dtype=np.float16).reshape(4, 8)
    given = [PromptEmbeds.of(ones).data, PromptEmbeds.of(halves).data, PromptEmbeds.of(2 * ones).data]
    given.append(given[0].replace(b"embeddings", b"other name"))
    digests = [(await check_request(request(one), "a", model)).items[0].digest for one in given]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3


def tensors(**described: object) -> bytes:
    header = json.dumps(described).encode()
    return len(header).to_bytes(8, "little") + header + bytes(96)


ONE = {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, 96]}
INVALID = {
    "no part": (request([]), "parts is empty"),
    "an empty part": (pb.GenerateRequest(parts=pb.PromptParts(parts=[pb.PromptPart()])), r"parts\[0\] is empty"),
    "many parts": (request(*[[70]] * 257), "parts has 257 entries; at most 256"),
    "a token outside": (request([70], [259]), r"parts\[1\].token_ids contains 259"),
    "too many tokens together": (request([70] * 60, [71] * 60), "parts has 120 tokens; the context has 100"),
    "too many embeddings": (
        request("a", PromptEmbeds.of(np.ones((99, 8), dtype=np.float32)).data),
        "parts has 100 tokens",
    ),
    "a 5 MB text": (request("x" * 5_000_000), r"parts\[0\].text has 5000000 characters"),
    "prompt log-probabilities": (
        request("a", EMBEDS, sampling=pb.SamplingParams(prompt_logprobs=1)),
        "sampling.prompt_logprobs is not possible",
    ),
    "cut": (request("a", EMBEDS, truncate_prompt_tokens=2), "truncate_prompt_tokens is not possible with parts"),
    "nothing": (request(b""), r"parts\[0\].prompt_embeds has 0 bytes and is no safetensors file"),
    "a header beyond the end": (request(b"\xff" * 20), "has 20 bytes and is no safetensors file"),
    "a large header": (request((5000).to_bytes(8, "little") + bytes(5000)), "a header of 5000 bytes; at most 4096"),
    "no JSON": (request((4).to_bytes(8, "little") + b"{{{{"), "its header is not JSON"),
    "a list": (request((2).to_bytes(8, "little") + b"[]"), "its header is not JSON"),
    "a deep header": (request((4000).to_bytes(8, "little") + b"[" * 4000), "its header is not JSON"),
    "a zip archive": (request(b"PK\x03\x04rest"), "is a pickle, as torch.save writes"),
    "a pickle": (request(b"\x80\x04rest"), "is a pickle, as torch.save writes"),
    # The length of this header begins with a pickle's first byte.
    "128 bytes of header": (request(bytes([128, *bytes(7)]) + b"{}".ljust(128)), "has 0 tensors; it must have one"),
    "no tensor": (request(tensors(__metadata__={})), "has 0 tensors; it must have one"),
    "two tensors": (request(tensors(a=ONE, b=ONE)), "has 2 tensors; it must have one"),
    "no shape": (request(tensors(a={"dtype": "F32"})), "no dtype, shape and data_offsets"),
    "doubles": (request(tensors(a=ONE | {"dtype": "F64"})), "a tensor of type F64; it must be one of F32, F16, BF16"),
    "a type that is no text": (request(tensors(a=ONE | {"dtype": ["F32"]})), "a tensor of type"),
    "one dimension": (
        request(tensors(a=ONE | {"shape": [24]})),
        r"shape \[24\]; it must be \[number of tokens, size\]",
    ),
    "no token": (request(tensors(a=ONE | {"shape": [0, 8]})), "a tensor of shape"),
    "a negative size": (request(tensors(a=ONE | {"shape": [-3, -8]})), "a tensor of shape"),
    "true": (request(tensors(a=ONE | {"shape": [True, 24]})), "a tensor of shape"),
    "another number of bytes": (request(tensors(a=ONE | {"shape": [4, 8]})), "has 96 bytes after its header"),
    "other offsets": (request(tensors(a=ONE | {"data_offsets": [1, 96]})), "has 96 bytes after its header"),
    "another size": (request(tensors(a=ONE | {"shape": [4, 6]})), "embeddings of 6 elements; this model's have 8"),
    **{
        f"{number} as {dtype.__name__}": (
            request(PromptEmbeds.of(np.array([[1] * 7 + [number]], dtype=dtype)).data),
            "contains NaN or infinity",
        )
        for number in (np.nan, -np.nan, np.inf, -np.inf)
        for dtype in (np.float32, np.float16)
    },
    "NaN as bfloat16": (
        request(tensors(a=ONE | {"dtype": "BF16", "shape": [6, 8]})[:-2] + b"\xc0\x7f"),
        "contains NaN or infinity",
    ),
}


@pytest.mark.parametrize(("message", "reason"), INVALID.values(), ids=INVALID)
async def test_what_is_wrong_is_said(message: pb.GenerateRequest, reason: str, model: ServedModel) -> None:
    with pytest.raises(RequestError, match=reason):
        await check_request(message, "a", model)


async def test_embeddings_of_a_request_have_a_limit_together(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_BYTES == 16 << 20
    monkeypatch.setattr("scheduler_service.frontend.checking.prompt_parts.MAX_BYTES", 2 * len(EMBEDS))
    assert len((await check_request(request(EMBEDS, EMBEDS), "a", model)).items) == 2
    with pytest.raises(RequestError, match=f"prompt_embeds have {3 * len(EMBEDS)} bytes or more; at most"):
        await check_request(request(EMBEDS, EMBEDS, EMBEDS), "a", model)


async def test_models_that_read_no_embeddings_refuse_them(byte_model: ServedModel) -> None:
    with pytest.raises(RequestError, match="this server runs without --enable-prompt-embeds, or its model reads none"):
        await check_request(request(EMBEDS), "a", byte_model)
    model = replace(byte_model, max_encoder_len=10, prompt_embeds_size=8)
    with pytest.raises(RequestError, match="parts cannot be the prompt of this decoder"):
        await check_request(request(EMBEDS, encoder_text="a"), "a", model)
    with pytest.raises(RequestError, match="this model generates no text"):
        await check_request(request(EMBEDS), "a", replace(byte_model, generates=False))
