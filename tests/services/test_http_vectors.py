"""Vectors and scores over HTTP are those of our own protocol, as OpenAI, Jina and vLLM have their calls."""

import asyncio
import base64
import io
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from embedding_helpers import TEXTS, assert_nothing_is_left, encoder_settings, serving
from engines import until
from http_edge import http_edge
from locked import KEYRING, KEYS
from scheduler_in_process import InProcess
from tiny_encoder import write_encoder

from pagewire_client import Client
from scheduler_service.frontend.http import server as http_server
from scheduler_service.frontend.http.limits import Room, client_of
from scheduler_service.frontend.http.vectors.embeddings import _shown
from scheduler_service.frontend.http.vectors.encodings import in_base64, in_type
from scheduler_service.frontend.http.vectors.fields import EmbeddingsFields

MODEL = "encoder"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture
async def server(encoder: Path) -> AsyncIterator[tuple[InProcess, str]]:
    async with serving(encoder, **encoder_settings()) as (one, _), http_edge(one.link) as url:
        yield one, url
        await assert_nothing_is_left(one)


@pytest.fixture
async def client(server: tuple[InProcess, str]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


JSON = {"Content-Type": "application/json"}


async def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    async with aiohttp.ClientSession(headers=JSON) as session, session.post(f"{url}{path}", data=data) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


@pytest.mark.parametrize("encoding_format", ["base64", "float"])
async def test_a_list_of_texts_has_a_vector_each(
    server: tuple[InProcess, str], client: openai.AsyncOpenAI, encoding_format: Any
) -> None:
    """To the bit, also as decimal numbers."""
    async with Client(server[0].target) as ours:
        for dimensions in (None, 10):
            expected = await ours.embed(TEXTS, dimensions=dimensions or 0)
            found = await client.embeddings.create(
                model=MODEL,
                input=TEXTS,
                encoding_format=encoding_format,
                **({} if dimensions is None else {"dimensions": dimensions}),
            )
            assert [one.index for one in found.data] == list(range(len(TEXTS)))
            decoded = [as_sent(one.embedding) for one in found.data]
            assert decoded == [list(one.vector) for one in expected]
            num_tokens = sum(one.usage.prompt_tokens for one in expected)
            assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)
            assert found.model == MODEL


def as_sent(numbers: str | list[float]) -> list[float]:
    """32-bit floats, in base64 or in decimal digits."""
    return list(array("f", base64.b64decode(numbers) if isinstance(numbers, str) else numbers))


async def test_an_input_is_a_text_or_token_ids_or_lists_of_them(
    server: tuple[InProcess, str], client: openai.AsyncOpenAI
) -> None:
    ids = [[5, 6, 7], [8]]
    async with Client(server[0].target) as ours:
        for given, texts in (("hello", ["hello"]), (ids[0], ids[:1]), (ids, ids), (["a"], ["a"])):
            found = await client.embeddings.create(model=MODEL, input=given)  # type: ignore[arg-type]
            assert [one.embedding for one in found.data] == [list(one.vector) for one in await ours.embed(texts)]


async def test_normalize_and_truncate_are_those_of_our_own_protocol(server: tuple[InProcess, str]) -> None:
    one, url = server
    async with Client(one.target) as ours:
        (expected,) = await ours.embed(["b" * 10_000], normalize=False, truncate=True)
    asked = {"input": "b" * 10_000, "normalize": False, "truncate": True, "dimensions": None, "user": "me"}
    status, found = await post(url, "/v1/embeddings", asked)
    assert status == 200
    assert as_sent(found["data"][0]["embedding"]) == list(expected.vector)


async def test_the_last_tokens_of_a_text_are_kept_where_asked(server: tuple[InProcess, str]) -> None:
    """Special tokens around a text count, and are not cut."""
    one, url = server
    text, ids = "ab" * 20 + "cde" * 20, list(range(5, 70))
    async with Client(one.target) as ours:
        for given, kept, same in ((text, 5, text[-3:]), (text, -1, text[-64:]), (ids, 5, ids[-5:])):
            (expected,) = await ours.embed([same])
            status, found = await post(url, "/v1/embeddings", {"input": [given], "truncate_prompt_tokens": kept})
            assert status == 200
            assert as_sent(found["data"][0]["embedding"]) == list(expected.vector)
        (cut,) = await ours.embed([ids], truncate_prompt_tokens=5)
        assert cut.vector == expected.vector
        assert await ours.score("xx wer", [text], truncate_prompt_tokens=5) == await ours.score("wer", [text[-3:]])
        ((_, expected_score),) = await ours.score("wer", [text[-3:]])
    for path, more in (
        ("score", {"text_1": "xx wer", "text_2": text}),
        ("rerank", {"query": "wer", "documents": [text]}),
    ):
        status, found = await post(url, f"/v1/{path}", more | {"truncate_prompt_tokens": 5})
        (shown,) = found["data" if path == "score" else "results"]
        assert shown["score" if path == "score" else "relevance_score"] == pytest.approx(expected_score)
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 67}):
        status, found = await post(url, "/v1/embeddings", {"input": "a"} | wrong)
        assert (status, "must be at least 1 and at most 66" in found["error"]["message"]) == (400, True)
    for wrong in ({"truncate": True, "truncate_prompt_tokens": 9}, {"truncate_prompt_tokens": 1}):
        assert (await post(url, "/v1/embeddings", {"input": "a"} | wrong))[0] == 400


NARROW: dict[str, Any] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NARROW |= {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("kind", NARROW)
def test_numbers_are_rounded_to_the_nearest_of_their_type(kind: Any) -> None:
    ties = torch.tensor([0.0, -0.0, 1.0625, 1.1875, -1.1875, 2**-10, 3 * 2**-10, 448.0])
    numbers = torch.cat([ties, *(torch.randn(9000) * scale for scale in (0.01, 1, 30))])
    expected = numbers.to(NARROW[kind]).view(torch.uint8).numpy().tobytes()
    given = numbers.numpy().tobytes()
    assert b"".join(in_type(given, kind, "little")) == expected
    assert base64.b64decode(b"".join(in_base64(given, kind, "little"))[1:-1]) == expected


async def test_vectors_come_as_bytes_of_any_type_and_order(server: tuple[InProcess, str]) -> None:
    one, url = server
    asked = {"input": ["a", "bc"], "embed_dtype": "float16", "endianness": "big"}
    async with Client(one.target) as ours:
        expected = b"".join(np.array(it.vector, ">f2").tobytes() for it in await ours.embed(asked["input"]))
    async with aiohttp.ClientSession(url) as session:
        for form in ("bytes", "bytes_only"):
            async with session.post("/v1/embeddings", json=asked | {"encoding_format": form}) as answer:
                assert await answer.read() == expected
                about = json.loads(answer.headers.get("metadata", "{}")).get("data", [])
                assert [it["end"] for it in about] == ([len(expected) // 2, len(expected)] if form == "bytes" else [])
    _, found = await post(url, "/v1/embeddings", asked | {"encoding_format": "base64"})
    assert b"".join(base64.b64decode(it["embedding"]) for it in found["data"]) == expected
    many = {"input": ["a"] * 257, "encoding_format": "bytes"}
    assert (await post(url, "/v1/embeddings", many))[0] == 400


async def test_tokens_have_vectors_of_their_own(server: tuple[InProcess, str]) -> None:
    """Their mean is the vector of the text."""
    _, url = server
    plain = {"input": [[5, 6, 7]], "use_activation": False}
    _, whole = await post(url, "/pooling", plain)
    _, parts = await post(url, "/pooling", plain | {"task": "token_embed"})
    vectors = parts["data"][0]["data"]
    assert [len(vector) for vector in vectors] == [len(whole["data"][0]["data"])] * 3
    assert np.mean(vectors, axis=0) == pytest.approx(whole["data"][0]["data"], rel=1e-5, abs=1e-6)
    _, packed = await post(url, "/pooling", plain | {"task": "token_embed", "encoding_format": "base64"})
    assert as_sent(packed["data"][0]["data"]) == [number for vector in vectors for number in as_sent(vector)]


async def test_cohere_gets_several_forms_at_once(server: tuple[InProcess, str]) -> None:
    one, url = server
    async with Client(one.target) as ours:
        first, last = await ours.embed(["c" * 64, "b" * 64])
    forms = ["float", "base64", "binary", "ubinary"]
    for truncate, expected in (("END", first), ("START", last)):
        asked = {"texts": ["c" * 64 + "b" * 64], "truncate": truncate, "embedding_types": forms}
        status, found = await post(url, "/v2/embed", asked)
        assert status == 200
        vectors = {form: found["embeddings"][form][0] for form in forms}
        assert as_sent(vectors["float"]) == as_sent(vectors["base64"]) == list(expected.vector)
        bits = [int(number > 0) for number in expected.vector]
        assert vectors["ubinary"] == [int("".join(map(str, bits[at : at + 8])), 2) for at in range(0, len(bits), 8)]
        assert vectors["binary"] == [byte - 128 for byte in vectors["ubinary"]]
        assert found["meta"]["billed_units"]["input_tokens"] == 66
    for wrong in ({"truncate": "NONE"}, {"input_type": "query"}, {"output_dimension": 9}, {"texts": []}):
        assert (await post(url, "/v2/embed", asked | wrong))[0] == 400


def test_the_vectors_of_many_tokens_are_shown_in_small_pieces() -> None:
    numbers = np.arange(300 * 512, dtype="<f4")
    for encoding_format in ("float", "base64"):
        fields = EmbeddingsFields(input="x", encoding_format=encoding_format)
        pieces = list(_shown(bytearray(numbers), 4 * 512, fields, of_tokens=True))
        assert max(map(len, pieces)) <= 1 << 16
        if encoding_format == "float":
            assert json.loads(b"".join(pieces)) == numbers.reshape(300, 512).tolist()


async def test_pairs_have_the_scores_of_each_query_alone(server: tuple[InProcess, str]) -> None:
    _, url = server
    queries, documents = ["a town", "one"], ["a town", "an answer"]
    alone = [
        (await post(url, "/score", {"queries": q, "items": d}))[1] for q, d in zip(queries, documents, strict=True)
    ]
    for names in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")):
        status, found = await post(url, "/score", dict(zip(names, (queries, documents), strict=True)))
        assert status == 200
        assert [(it["index"], it["score"]) for it in found["data"]] == [
            (index, pytest.approx(answer["data"][0]["score"])) for index, answer in enumerate(alone)
        ]
        assert found["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)


async def test_the_fields_tell_which_route_is_invoked(server: tuple[InProcess, str]) -> None:
    _, url = server
    for path, asked in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b"]}),
        ("/v1/score", {"queries": "a", "documents": ["a", "b"]}),
    ):
        (status, expected), (_, found) = await post(url, path, asked), await post(url, "/invocations", asked)
        name = "results" if path == "/v1/rerank" else "data"
        assert (status, found[name]) == (200, expected[name])
    for wrong in ({"inputs": "a"}, [1], b"{"):
        assert (await post(url, "/invocations", wrong))[0] == 400


async def test_documents_are_ranked_and_scored(server: tuple[InProcess, str]) -> None:
    one, url = server
    documents = ["a town", "an answer", "another", "a question"]
    async with Client(one.target) as ours:
        expected = await ours.score("a question", documents)
    asked = {"model": MODEL, "query": "a question", "documents": [*documents[:3], {"text": documents[3]}]}
    status, found = await post(url, "/v1/rerank", asked)
    assert status == 200
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == expected
    assert [one["document"]["text"] for one in found["results"]] == [documents[index] for index, _ in expected]
    assert found["usage"]["total_tokens"] > 4
    status, best = await post(url, "/v1/rerank", asked | {"top_n": 2, "return_documents": False})
    assert best["results"] == [{"index": index, "relevance_score": score} for index, score in expected[:2]]
    status, scored = await post(url, "/v1/score", {"model": MODEL, "text_1": "a question", "text_2": documents})
    assert status == 200
    assert [(one["index"], one["score"]) for one in scored["data"]] == sorted(expected)
    status, scored = await post(url, "/v1/score", {"text_1": "a question", "text_2": documents[1]})
    assert [one["score"] for one in scored["data"]] == [dict(expected)[1]]
    status, scored = await post(url, "/v1/score", {"queries": "a question", "documents": documents})
    assert [(one["index"], one["score"]) for one in scored["data"]] == sorted(expected)


REFUSED: list[tuple[str, Any, int, str]] = [
    ("embeddings", {"input": "x", "model": "other"}, 404, "there is no model 'other'; this server has encoder"),
    ("embeddings", {"input": []}, 400, "inputs is empty"),
    ("embeddings", {"input": [""] * 100_000}, 400, "input has more than the 2048 entries"),
    ("embeddings", {"input": [[5]] * 100_000}, 400, "input has more than the 2048 entries"),
    ("rerank", {"query": "x", "documents": [""] * 100_000}, 400, "documents has more than the 2048 entries"),
    ("score", {"text_1": "x", "text_2": [""] * 100_000}, 400, "text_2 has more than the 2048 entries"),
    ("embeddings", b'{"input":[' + b"{}," * 300_000 + b"{}]}", 400, "input does not have the form"),
    ("rerank", b'{"query":"x","documents":[' + b"{}," * 300_000 + b"{}]}", 400, "documents does not have the form"),
    ("embeddings", {}, 400, "input: Field required"),
    ("embeddings", {"input": ["x", 3]}, 400, "input does not have the form that it must have"),
    ("embeddings", {"input": [-1]}, 400, "input does not have the form"),
    ("embeddings", {"input": [1 << 32]}, 400, "input does not have the form"),
    ("embeddings", {"input": [1 << 31]}, 400, "inputs[0].token_ids"),
    ("embeddings", {"input": "x" * 500}, 400, "inputs[0] has more tokens than the 66"),
    ("embeddings", {"input": "x", "dimensions": 4000}, 400, "dimensions is 4000"),
    ("embeddings", {"input": "x", "dimensions": 1.5}, 400, "dimensions: "),
    ("embeddings", {"input": "x", "dimensions": 0}, 400, "dimensions: "),
    ("rerank", {"query": "x", "documents": [{"text": "x", "image": "y"}]}, 400, "documents does not have the form"),
    ("score", {"text_1": "x", "queries": "x", "documents": "y"}, 400, "set one of queries, text_1"),
    ("score", {"queries": "x"}, 400, "set one of documents, items"),
    ("embeddings", {"input": "x", "encoding_format": "hex"}, 400, "encoding_format: "),
    ("embeddings", {"input": "x", "input_type": "query"}, 400, "input_type is not supported here"),
    ("embeddings", {"input": "x", "y" * 1000: 1}, 400, " is not supported here"),
    ("embeddings", [1], 400, "the body: "),
    ("embeddings", b"", 400, "the body is not JSON"),
    ("embeddings", b'{"input": "x"', 400, "the body is not JSON"),
    ("embeddings", b'{"input": "\xff"}', 400, "the body is not JSON"),
    ("embeddings", b"[" * 100_000, 400, "the body is not JSON"),
    ("embeddings", b'{"input": "x", "dimensions": NaN}', 400, "dimensions"),
    ("embeddings", b" " * ((1 << 20) + 1), 413, "it may have 1048576"),
    ("rerank", {"query": "x", "documents": []}, 400, "documents"),
    ("rerank", {"query": "x", "documents": [{"title": "x"}]}, 400, "documents does not have the form"),
    ("score", {"text_1": ["x", "y"], "text_2": "z"}, 400, "there are 2 queries and 1 documents"),
    ("score", {"queries": [], "documents": []}, 400, "at least one query and one document"),
    ("score", {"queries": ["x"] * 2, "documents": ["x", "y" * 500]}, 400, "pair 1: documents[0]"),
    ("embeddings", {"input": "x", "embed_dtype": "float16"}, 400, "embed_dtype is float16, and encoding_format float"),
    ("embeddings", {"input": "x", "endianness": "big"}, 400, "endianness is big, and encoding_format float"),
    ("score", {"queries": ["x"] * 257, "documents": ["x"] * 257}, 400, "there are 257 pairs"),
    ("embeddings", {"input": "x", "normalize": True, "use_activation": False}, 400, "normalize and use_activation"),
    ("edits", {}, 404, "POST /v1/edits is not served here"),
]


async def test_what_cannot_be_is_an_error_as_openai_has_them(server: tuple[InProcess, str]) -> None:
    for path, body, status, words in REFUSED:
        found, answer = await post(server[1], f"/v1/{path}", body)
        said = answer["error"]["message"] if isinstance(answer, dict) else answer
        assert (found, words in said) == (status, True), (path, str(body)[:60], found, said)
        assert len(str(answer)) < 500


async def test_a_model_that_makes_no_vectors_says_so(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "ranker", num_labels=1, architectures=["BertForSequenceClassification"])
    async with serving(folder, **encoder_settings()) as (one, _), http_edge(one.link) as url:
        status, answer = await post(url, "/v1/embeddings", {"input": "x"})
        assert (status, answer["error"]["code"]) == (501, "not_implemented")


async def test_what_a_key_makes_this_process_hold_is_bounded_and_other_keys_are_served_meanwhile(
    server: tuple[InProcess, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come of bodies that are under way, and vectors that are kept."""
    one, _ = server
    room = Room(4_000)
    monkeypatch.setattr(http_server, "Room", lambda: room)
    monkeypatch.setattr(one.link, "keyring", KEYRING)
    gold, other = ({"Authorization": f"Bearer {KEYS[name]}"} for name in ("gold", "admin"))
    async with http_edge(one.link) as url, aiohttp.ClientSession(headers=JSON | gold) as session:
        go_on = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"input": '.ljust(1_500)
            await go_on.wait()
            yield b'"x"}'

        async def send(body: Any, headers: dict[str, str] = gold) -> int:
            async with session.post(f"{url}/v1/embeddings", data=body, headers=headers) as response:
                answer = await response.json()
                assert response.status == 200 or answer["error"]["code"] == "overloaded"
                return response.status

        first = asyncio.create_task(send(slowly()))
        await until(lambda: room.num_free == 2_500)
        more = json.dumps({"input": "x"}).ljust(500)
        assert [await send(more), await send(more, other)] == [503, 200]
        go_on.set()
        assert await first == 200
        assert await send(json.dumps({"input": ["x"] * 12})) == 503  # vectors of 192 bytes
        assert await send(json.dumps({"input": "x"})) == 200
        assert room.num_free == 4_000


def test_clients_without_keys_are_told_apart_by_their_addresses() -> None:
    addresses = ["10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2:3", "2001:db8:0:1::1", ""]
    found = [client_of(None, address) for address in addresses]
    assert found == ["10.0.0.1", "10.0.0.2", "10.0.0.1", "2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64", ""]


async def test_a_client_that_leaves_ends_its_call(server: tuple[InProcess, str]) -> None:
    one, url = server
    async with aiohttp.ClientSession(headers=JSON) as session:
        body = json.dumps({"input": ["x" * 60] * 2048})
        asked = asyncio.create_task(session.post(f"{url}/v1/embeddings", data=body))
        await until(lambda: one.engine.requests.in_flight)
        asked.cancel()
        await asyncio.wait([asked])
    await assert_nothing_is_left(one)
