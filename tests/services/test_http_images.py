"""Images in the bodies of every API become the same parts of a chat."""

import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from engines import running
from fake_worker_service import FakeWorkerService, serving
from http_edge import http_edge
from image_chats import TALL, TEMPLATES, WIDE, fake_image_model, image_of, layout_of_fake_model, write_image_tokenizer
from sounds import file_of, samples, wav

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.chat.families import HERMES
from scheduler_service.frontend.http.images.fetching import Media
from scheduler_service.frontend.http.limits import MAX_ITEM_BYTES
from scheduler_service.frontend.http.service import ChatRequest, Service
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel

WIDE_IMAGE, TALL_IMAGE = image_of(*WIDE), image_of(*TALL, form="WEBP")
WIDE_TEXT, TALL_TEXT = (base64.b64encode(image).decode() for image in (WIDE_IMAGE, TALL_IMAGE))
URL = f"data:image/png;base64,{WIDE_TEXT}"
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MODEL: dict[str, Any] = {"model": "bytes"}
ASKS: dict[str, Any] = MODEL | {"max_tokens": 5}


@pytest.fixture(scope="module")
def model(byte_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("http") / "both"
    write_image_tokenizer(directory, TEMPLATES["both"] + "{# reads tools #}")
    return replace(fake_image_model(byte_model, directory), chat_syntax=HERMES)


class Edge:
    """A front end's HTTP server without an engine. `chats`: the chats that would have been generated for."""

    def __init__(self, url: str, link: EngineLink) -> None:
        self.url, self.link = url, link
        self.chats: list[pb.Chat] = []

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        data = io.BytesIO(json.dumps(body).encode())
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=data, headers={"content-type": "application/json"}) as answer,
        ):
            return answer.status, await answer.json()

    async def chat(self, path: str, body: dict[str, Any]) -> list[tuple[str, list[str | bytes]]]:
        """The role, texts and images of each message of the chat that a body becomes."""
        status, answer = await self.post(path, body)
        assert status == 409, answer
        return [
            (
                message.role,
                [part.image.data or part.sound.data or part.text for part in message.parts]
                if message.parts
                else [message.content],
            )
            for message in self.chats.pop().messages
        ]

    async def refusal(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        status, answer = await self.post(path, body)
        error = answer["error"]
        return status, error if isinstance(error, str) else error["message"]


@pytest.fixture
async def edge(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Edge]:
    link = EngineLink("unix:/of-no-engine")
    link.loading.model = model
    async with http_edge(link) as url:
        found = Edge(url, link)

        @asynccontextmanager
        async def chat(_: Service, request: ChatRequest, *__: Any) -> AsyncIterator[Any]:
            found.chats.append(request.asked.chat)
            raise RequestError(grpc.StatusCode.ALREADY_EXISTS, "the chat has been read")
            yield

        async def admit(*_: Any) -> None: ...

        monkeypatch.setattr(Service, "chat", chat)
        monkeypatch.setattr(EngineCall, "admit_side_call", admit)
        yield found


def of_user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def openai_image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def anthropic_image(data: str, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


LOOK, LOOK_INPUT = {"type": "text", "text": "look"}, {"type": "input_text", "text": "look"}
INPUT = {"type": "input_image", "image_url": URL, "detail": "auto"}
IMAGES_FIRST = [WIDE_IMAGE, TALL_IMAGE, "look"]
SENT: dict[str, tuple[str, dict[str, Any], list[str | bytes]]] = {
    "OpenAI's chats": (
        CHAT,
        {"messages": [of_user(LOOK, openai_image(URL, detail="high"), LOOK, LOOK)]},
        ["look", WIDE_IMAGE, "look\nlook"],
    ),
    "responses": (RESPONSES, {"input": [of_user(LOOK_INPUT, INPUT)]}, ["look", WIDE_IMAGE]),
    "Anthropic's messages": (
        ANTHROPIC,
        ASKS | {"messages": [of_user(anthropic_image(WIDE_TEXT), anthropic_image(TALL_TEXT, "image/webp"), LOOK)]},
        IMAGES_FIRST,
    ),
    "Ollama's chats": (
        "/api/chat",
        MODEL | {"messages": [{"role": "user", "content": "look", "images": [WIDE_TEXT, TALL_TEXT]}]},
        IMAGES_FIRST,
    ),
    "Ollama's generate": ("/api/generate", MODEL | {"prompt": "look", "images": [WIDE_TEXT, TALL_TEXT]}, IMAGES_FIRST),
    "Ollama's generate without a text": ("/api/generate", MODEL | {"images": [TALL_TEXT]}, [TALL_IMAGE]),
}


@pytest.mark.parametrize("api", SENT)
async def test_every_api_has_images(edge: Edge, api: str) -> None:
    path, body, parts = SENT[api]
    assert await edge.chat(path, body) == [("user", parts)]


async def test_images_of_tools_are_in_a_message_behind_all_results(edge: Edge) -> None:
    """Agents send them, and few chat templates read images in results."""
    calls = [{"type": "tool_use", "id": name, "name": "see", "input": {}} for name in "ab"]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [LOOK, anthropic_image(WIDE_TEXT)]},
        {"type": "tool_result", "tool_use_id": "b", "content": [anthropic_image(TALL_TEXT, "image/webp")]},
    ]
    wanted = [("tool", ["look"]), ("tool", [""]), ("user", [WIDE_IMAGE, TALL_IMAGE])]
    said = [of_user(LOOK), {"role": "assistant", "content": calls}]
    assert (await edge.chat(ANTHROPIC, ASKS | {"messages": [*said, of_user(*results)]}))[2:] == wanted
    more = await edge.chat(ANTHROPIC, ASKS | {"messages": [*said, of_user(*results, LOOK)]})
    assert more[2:] == [*wanted[:2], ("user", [WIDE_IMAGE, TALL_IMAGE, "look"])]
    tall = {"type": "input_image", "image_url": f"data:image/webp;base64,{TALL_TEXT}"}
    items = [
        of_user(LOOK_INPUT),
        *({"type": "function_call", "call_id": name, "name": "see", "arguments": "{}"} for name in "ab"),
        {"type": "function_call_output", "call_id": "a", "output": [LOOK_INPUT, INPUT]},
        {"type": "function_call_output", "call_id": "b", "output": [tall]},
    ]
    assert (await edge.chat(RESPONSES, {"input": items}))[2:] == wanted


async def test_routes_that_count_tokens_count_images(edge: Edge) -> None:
    num_tokens = len(layout_of_fake_model(*WIDE).token_ids) - len(layout_of_fake_model(*TALL).token_ids)
    counts = []
    for data, kind in ((WIDE_TEXT, "image/png"), (TALL_TEXT, "image/webp")):
        url = f"data:{kind};base64,{data}"
        status, answer = await edge.post("/tokenize", {"messages": [of_user(openai_image(url), LOOK)]})
        assert (status, len(answer["tokens"])) == (200, answer["count"])
        body = MODEL | {"messages": [of_user(anthropic_image(data, kind), LOOK)]}
        assert (await edge.post(f"{ANTHROPIC}/count_tokens", body))[1] == {"input_tokens": answer["count"]}
        counts.append(answer["count"])
    assert counts[0] - counts[1] == num_tokens > 0


def chat(*content: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [of_user(*content)]}


def message(source: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return ANTHROPIC, ASKS | {"messages": [of_user({"type": "image", "source": source, **more})]}


def response(**part: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": [of_user({"type": "input_image", **part})]}


REFUSED: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat(openai_image("data:image/png;base64,x*")), r"messages[0].content[0].image_url.url is not base64"),
    (chat(openai_image(f"data:image/png,{WIDE_TEXT}")), "is a data: URL without base64"),
    (chat(openai_image(f"data:text/plain;base64,{WIDE_TEXT}")), "is a data: URL of the type 'text/plain'"),
    (chat(openai_image("file:///etc/passwd")), "cannot be fetched: the URL has the scheme 'file'"),
    (chat(openai_image("http://169.254.169.254/x")), "169.254.169.254:80, which --allow-media-host does not allow"),
    (chat(openai_image("https://images.test/x")), "images.test:443, which --allow-media-host does not allow"),
    (chat(openai_image(URL, detail="huge")), "image_url.detail is 'huge'; it must be one of auto, low, high"),
    (chat({"type": "image_url", "image_url": URL}), "messages[0].content[0].image_url is 'data:"),
    (chat({"type": "image_url"}), "image_url is missing; it must be an object"),
    (chat(openai_image(URL, size=1)), "image_url.size is no field"),
    (chat({"type": "input_audio", "input_audio": {}}), "reads text and images; it must be text, image_url or refusal"),
    (chat({"type": "video_url", "video_url": {}}), "type is 'video_url', and this model reads text and images"),
    (chat(*[openai_image(URL)] * 257), "images has 257 entries; at most 256"),
    (message({"type": "file", "file_id": "x"}), "source.type is 'file'; it must be base64 or url"),
    (message({"type": "url", "url": "https://images.test/x"}), "source.url cannot be fetched"),
    (message({"type": "base64", "media_type": "image/bmp", "data": ""}), "media_type is 'image/bmp'"),
    (message({"type": "base64", "media_type": "image/png", "data": "x"}), "content[0].source.data is not base64"),
    (message({"type": "base64", "media_type": "image/png"}), "source.data is missing"),
    (message(None), "source is missing; it must be an object"),
    (message({}, title="x"), "title is no field"),
    (
        (ANTHROPIC, ASKS | {"system": [anthropic_image(WIDE_TEXT)], "messages": [of_user(LOOK)]}),
        "system has an image; only messages of the user and results of tools have images",
    ),
    (
        (ANTHROPIC, ASKS | {"messages": [of_user(LOOK), {"role": "assistant", "content": [anthropic_image("")]}]}),
        "type is 'image', which messages of the role assistant do not have",
    ),
    (response(file_id="x"), "file_id is not supported here"),
    (response(detail="auto"), "input[0].content[0].image_url: Field required"),
    (response(image_url="https://images.test/x"), "input[0].content[0].image_url cannot be fetched"),
    (
        (RESPONSES, {"input": [of_user(LOOK_INPUT), {"role": "assistant", "content": [INPUT]}]}),
        "type is 'input_image', and this model reads text alone",
    ),
    (("/api/chat", MODEL | {"messages": [{"role": "user", "content": "", "images": "x"}]}), "images is 'x'"),
    (
        ("/api/chat", MODEL | {"messages": [{"role": "user", "content": "", "images": ["x"]}]}),
        "images[0] is not base64",
    ),
    (("/api/generate", MODEL | {"prompt": "a", "raw": True, "images": [WIDE_TEXT]}), "images cannot be combined with"),
]


@pytest.mark.parametrize(("asked", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
async def test_what_is_wrong_is_said(edge: Edge, asked: tuple[str, dict[str, Any]], reason: str) -> None:
    status, said = await edge.refusal(*asked)
    assert status == 400
    assert reason in said


async def test_a_model_without_images_refuses_them_by_name(edge: Edge, model: ServedModel) -> None:
    edge.link.loading.model = replace(model, images=None, images_refusal="its tokens see each other both ways")
    for path, body, _ in SENT.values():
        status, said = await edge.refusal(path, body)
        assert status == 400
        assert "image" in said
        assert "this model reads text alone (its tokens see each other both ways)" in said


def openai_sound(data: bytes, kind: Any = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


async def test_chats_of_openai_have_sounds(edge: Edge, model: ServedModel) -> None:
    edge.link.loading.model = replace(model, images=None, sounds=model.images)
    sound, mp3 = wav(0.1), file_of(samples(0.1), "MP3", "MPEG_LAYER_III")
    body = chat(openai_sound(sound), LOOK, LOOK, openai_sound(mp3, "mp3"))
    assert await edge.chat(*body) == [("user", [sound, "look\nlook", mp3])]
    for asked, reason in (
        (chat(openai_sound(sound, "mp3")), "content[0].input_audio.data does not begin as a file of the format mp3"),
        (chat(openai_sound(mp3)), "does not begin as a file of the format wav"),
        (chat(openai_sound(sound, "flac")), "input_audio.format is 'flac'; it must be mp3 or wav"),
        (chat(openai_sound(sound, ["wav"])), "input_audio.format is "),
        (chat({"type": "input_audio", "input_audio": {"data": "x*", "format": "wav"}}), "data is not base64"),
        (chat({"type": "input_audio", "input_audio": {"format": "wav"}}), "input_audio.data is missing"),
        (chat({"type": "input_audio"}), "input_audio is missing; it must be an object"),
        (chat(openai_image(URL)), "reads text and sounds; it must be text, input_audio or refusal"),
        (message({"type": "base64", "media_type": "image/png", "data": ""}), "this model reads text and sounds"),
        ((RESPONSES, {"input": [of_user(openai_sound(sound))]}), "this model reads text and sounds"),
    ):
        status, said = await edge.refusal(*asked)
        assert status == 400
        assert reason in said


async def test_a_body_may_be_large_with_images_alone(edge: Edge) -> None:
    """Up to 8 MiB of images, whose base64 is not held to the limit of texts."""
    large = openai_image("data:image/png;base64," + "AAAA" * (MAX_ITEM_BYTES // 3 - 25_000))
    ((_, (image, _)),) = await edge.chat(*chat(large, LOOK))
    assert len(image) > 7 << 20
    batch = {"messages": [[of_user(large, LOOK)]]}
    assert (await edge.chat(f"{CHAT}/batch", batch))[0][1][0] == image
    long_text = {"type": "text", "text": "x" * 2_000_000}
    assert await edge.refusal(*chat(openai_image(URL), long_text)) == (
        413,
        "the body has 2000124 bytes without its images; it may have 1048576",
    )
    assert (await edge.refusal(*chat(large, large)))[0] == 413
    stored = {"input": [of_user({**INPUT, "image_url": large["image_url"]["url"]})], "store": True}
    status, said = await edge.refusal(RESPONSES, stored)
    assert (status, "store is true" in said) == (413, True)


async def test_an_image_of_an_allowed_host_is_fetched(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def fetch(_: Media, url: str, take: Any, client: str) -> bytes:
        asked.append(url)
        assert client == "127.0.0.1"
        take(len(WIDE_IMAGE))
        return WIDE_IMAGE

    monkeypatch.setattr(Media, "fetch", fetch)
    url = "https://images.test/x"
    wanted = [("user", [WIDE_IMAGE])]
    assert await edge.chat(*chat(openai_image(url))) == wanted
    assert await edge.chat(*message({"type": "url", "url": url})) == wanted
    assert await edge.chat(*response(image_url=url)) == wanted
    assert asked == [url] * 3


@asynccontextmanager
async def served(model: ServedModel, tmp_path: Path) -> AsyncIterator[tuple[Edge, FakeWorkerService]]:
    """An engine with a worker. What it computes is recorded in the file "record"."""
    tokenizer = tmp_path / "tokenizer"
    write_image_tokenizer(tokenizer, TEMPLATES["both"])
    worker = FakeWorkerService(tokenizer)
    worker.info.encoder_cache_size, worker.info.vocabulary_size = 64, 260
    async with serving(worker) as address, running(address, record=tmp_path / "record") as engine:
        engine.link.loading.model = replace(await engine.model(), images=model.images)
        async with http_edge(engine.link) as url:
            yield Edge(url, engine.link), worker


def in_every_api(image: bytes) -> list[tuple[str, dict[str, Any], str]]:
    """Paths, bodies with an image, and its name in them."""
    text = base64.b64encode(image).decode()
    url = f"data:image/png;base64,{text}"
    options = {"model": "fake", "options": {"num_predict": 3}, "stream": False}
    return [
        (
            CHAT,
            {"messages": [of_user(LOOK), of_user(LOOK, openai_image(url))], "max_tokens": 3},
            "messages[1].content[1].image_url.url",
        ),
        (
            RESPONSES,
            {"input": [of_user(LOOK_INPUT), of_user({**INPUT, "image_url": url})], "max_output_tokens": 3},
            "input[1].content[0].image_url",
        ),
        (
            ANTHROPIC,
            {"model": "fake", "max_tokens": 3, "messages": [of_user(LOOK, anthropic_image(text))]},
            "messages[0].content[1].source.data",
        ),
        (
            "/api/chat",
            {**options, "messages": [{"role": "user", "content": "look", "images": [text]}]},
            "messages[0].images[0]",
        ),
        ("/api/generate", {**options, "prompt": "look", "images": [text]}, "images[0]"),
        ("/tokenize", {"messages": [of_user(openai_image(url))]}, "messages[0].content[0].image_url.url"),
    ]


async def test_errors_about_the_content_of_an_image_name_it_as_the_api_does(model: ServedModel, tmp_path: Path) -> None:
    async with served(model, tmp_path) as (edge, _):
        for image, reason in ((WIDE_IMAGE[:40], "is damaged or cut off"), (image_of(9, 1), "has 9 pixels in a row")):
            for path, body, place in in_every_api(image):
                status, said = await edge.refusal(path, body)
                assert (status, said[: len(place) + 1 + len(reason)]) == (400, f"{place} {reason}"), said
        many = {"messages": [of_user(LOOK, *[openai_image(URL)] * 256)]}
        assert await edge.refusal(CHAT, many) == (
            400,
            "messages[0].content has 257 entries; at most 256 are allowed",
        )


async def test_errors_about_images_of_a_batch_name_the_conversation(model: ServedModel, tmp_path: Path) -> None:
    """Each conversation has names of its own for its images."""
    look, late, bad = openai_image(URL), of_user(LOOK), openai_image(URL[:-40])
    batches = [
        ([[of_user(LOOK, bad)], [late, of_user(look)]], 0, "messages[0].content[1].image_url.url"),
        ([[of_user(LOOK, look)], [late, of_user(bad)], [of_user(LOOK)]], 1, "messages[1].content[0].image_url.url"),
    ]
    async with served(model, tmp_path) as (edge, _):
        for messages, number, place in batches:
            status, said = await edge.refusal(f"{CHAT}/batch", {"messages": messages, "max_tokens": 3})
            wanted = f"conversation {number}: {place} is damaged or cut off"
            assert (status, said[: len(wanted)]) == (400, wanted)


async def test_usage_counts_images_and_a_worker_receives_each_once(model: ServedModel, tmp_path: Path) -> None:
    """Whatever the API; the recording has no image."""
    image = image_of(*WIDE, shade=91)
    text = base64.b64encode(image).decode()
    url = f"data:image/png;base64,{text}"
    options = {"options": {"num_predict": 3}, "stream": False, "messages": [{**of_user(), "content": "look"}]}
    options["messages"][0]["images"] = [text]
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [of_user(openai_image(url), LOOK)], "max_tokens": 3}),
        (RESPONSES, {"input": [of_user({**INPUT, "image_url": url}, LOOK_INPUT)], "max_output_tokens": 3}),
        (ANTHROPIC, {"model": "fake", "max_tokens": 3, "messages": [of_user(anthropic_image(text), LOOK)]}),
        ("/api/chat", {"model": "fake", **options}),
    ]
    async with served(model, tmp_path) as (edge, worker):
        counted = (await edge.post("/tokenize", {"messages": asked[0][1]["messages"]}))[1]["count"]
        for path, body in asked:
            status, answer = await edge.post(path, body)
            assert status == 200, answer
            usage = answer.get("usage", answer)
            found = [usage.get(name, 0) for name in ("prompt_tokens", "input_tokens", "cache_read_input_tokens")]
            assert sum(found) + usage.get("prompt_eval_count", 0) == counted, path
    assert [(item.data, item.image.part) for item in worker.received if item.data] == [(image, 0)]
    assert len(worker.received) == 2 * len(asked)
    recording = (tmp_path / "record").read_bytes()
    assert image[-40:] not in recording
    assert len(recording) > 1000
