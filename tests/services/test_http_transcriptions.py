"""OpenAI's calls for sounds, over HTTP, in front of a model that hears and understands nothing."""

import io
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from embedding_helpers import serving
from http_edge import http_edge
from openai.types.audio import TranscriptionSegment, TranscriptionWord
from scheduler_in_process import InProcess
from sounds import wav
from tiny_encoder_decoder import write_whisper

from pagewire_client import Client, Sound

BLOCKS = {"block_size": 16, "num_gpu_blocks_override": 400}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("models") / "whisper")


@pytest.fixture
async def server(model: Path) -> AsyncIterator[tuple[InProcess, str]]:
    async with serving(model, **BLOCKS) as (one, _), http_edge(one.link) as url:
        yield one, url


def form(
    data: bytes, name: str = "speech.wav", more: Sequence[tuple[str, str]] = (), **fields: str
) -> aiohttp.FormData:
    made = aiohttp.FormData([*({"model": "whisper"} | fields).items(), *more])
    made.add_field("file", io.BytesIO(data), filename=name, content_type="application/octet-stream")
    return made


def compression_ratio(text: str) -> float:
    """As Whisper's own code has it."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def two_files() -> aiohttp.FormData:
    made = form(wav(1))
    made.add_field("file", io.BytesIO(wav(1)), filename="other.wav")
    return made


GRANULARITY = ("timestamp_granularities[]", "segment")
WORDS = ("timestamp_granularities[]", "word")


async def test_verbose_json_has_the_granularities_that_were_asked_for(server: tuple[InProcess, str]) -> None:
    one, url = server
    async with Client(one.target) as client:
        sound = Sound(wav(8, 2), "audio/wav")
        events = [event async for event in client.transcribe(sound, language="de", words=True)]
    words = [word for event in events for word in event.segment.words if word.text.strip()]
    assert words
    async with aiohttp.ClientSession() as session:
        for granularities in ([WORDS], [GRANULARITY], [WORDS, GRANULARITY], []):
            body = form(wav(8, 2), more=granularities, language="de", response_format="verbose_json")
            async with session.post(f"{url}/v1/audio/transcriptions", data=body) as response:
                found = json.loads(await response.text())
            assert ("words" in found) is (WORDS in granularities)
            assert ("segments" in found) is (granularities != [WORDS])
            for word, said in zip(found.get("words", words), words, strict=True):
                if "words" in found:
                    checked = TranscriptionWord.model_validate(word, strict=True)
                    assert (checked.word, checked.start, checked.end) == (
                        said.text.strip(),
                        pytest.approx(said.start_seconds, abs=0.006),
                        pytest.approx(said.end_seconds, abs=0.006),
                    )


async def test_a_sound_is_answered_in_each_format_with_what_transcribe_says(server: tuple[InProcess, str]) -> None:
    one, url = server
    sound = wav(8, 2)
    async with Client(one.target) as client:
        events = [event async for event in client.transcribe(Sound(sound, "audio/wav"), language="de")]
    segments = [event.segment for event in events if event.HasField("segment")]
    text = "".join(segment.text for segment in segments).lstrip()
    assert text
    async with aiohttp.ClientSession() as session:

        async def post(**fields: str) -> str:
            path = f"{url}/v1/audio/transcriptions"
            async with session.post(path, data=form(sound, language="de", **{"prompt": ""} | fields)) as response:
                assert response.status == 200
                return await response.text()

        assert json.loads(await post()) == {"text": text}
        assert await post(response_format="text") == text + "\n"
        whole = json.loads(await post(response_format="verbose_json"))
        assert (whole["text"], whole["language"], whole["duration"]) == (text, "de", pytest.approx(8))
        assert [segment["text"] for segment in whole["segments"]] == [segment.text for segment in segments]
        for number, (segment, plain) in enumerate(zip(whole["segments"], segments, strict=True)):
            checked = TranscriptionSegment.model_validate(segment, strict=True)
            assert set(segment) == set(TranscriptionSegment.model_fields)
            assert (checked.id, checked.seek, checked.temperature) == (number, 0, 0)
            assert checked.tokens == list(plain.token_ids)
            assert checked.avg_logprob < 0 < checked.no_speech_prob < 1
            assert checked.compression_ratio == pytest.approx(compression_ratio(plain.text))
        times = [(round(segment.start_seconds, 2), round(segment.end_seconds, 2)) for segment in segments]
        assert all(0 <= end < 10 for _, end in times)
        cues = [f"00:00:{start:06.3f} --> 00:00:{end:06.3f}" for start, end in times]
        texts = [" ".join(segment.text.split()) for segment in segments]
        of_vtt = "".join(f"{cue}\n{said}\n\n" for cue, said in zip(cues, texts, strict=True))
        assert await post(response_format="vtt") == "WEBVTT\n\n" + of_vtt
        numbered = [f"{number}\n{cue.replace('.', ',')}\n" for number, cue in enumerate(cues, 1)]
        assert await post(response_format="srt") == "".join(
            f"{cue}{said}\n\n" for cue, said in zip(numbered, texts, strict=True)
        )
        lines = (await post(stream="true")).strip().split("\n\n")
        *deltas, done = (json.loads(line.removeprefix("data: ")) for line in lines)
        assert "".join(delta["delta"] for delta in deltas) == done["text"] == text
        assert json.loads(await post(prompt="Houston, we have a problem")) not in ({"text": text}, {"text": ""})
        assert json.loads(await post(prompt="é" * 5000))["text"]
        assert json.loads(await post(more=[GRANULARITY] * 2)) == {"text": text}
        async with session.post(f"{url}/v1/audio/translations", data=form(sound, language="de")) as response:
            assert (await response.json())["text"]


REFUSED: list[tuple[aiohttp.FormData, int, str]] = [
    (form(wav(2)[:20_000]), 400, "sound: data is cut off"),
    (form(b"hello", "speech.wav"), 400, "sound: data is not a readable sound file"),
    (form(wav(1), language="xx"), 400, "language is 'xx'"),
    (form(wav(1), response_format="xml"), 400, "response_format is 'xml'; it must be one of json"),
    (form(wav(1), temperature="hot"), 400, "temperature is not a number"),
    (form(wav(1), include="logprobs"), 400, "include is not supported here"),
    (form(wav(1), prompt="x" * 65_537), 400, "prompt has 65537 characters"),
    (form(wav(1), more=[WORDS]), 400, "timestamp_granularities is 'word', and response_format 'json'"),
    (
        form(wav(1), more=[("timestamp_granularities[]", "line")]),
        400,
        "timestamp_granularities is 'line'; it may be",
    ),
    (form(wav(1), model="other"), 404, "there is no model 'other'; this server has whisper"),
    (aiohttp.FormData({"model": "whisper"}), 400, "file is missing"),
    (form(wav(1), more=[GRANULARITY] * 40), 400, "more than 32 parts"),
    (form(wav(1), vad_filter="true"), 400, "vad_filter is not supported here"),
    (form(wav(1), more=[("language", "en"), ("language", "de")]), 400, "language is given twice"),
    (form(wav(1), timestamp_granularities="word"), 400, "and response_format 'json'"),
    (form(wav(1), more=[GRANULARITY, WORDS], response_format="srt"), 400, "and response_format 'srt'"),
    (form(wav(1), stream="yes"), 400, "stream is neither true nor false"),
    (form(wav(1), stream="true", response_format="srt"), 400, "stream gives events, and no srt"),
    (two_files(), 400, "file is given twice"),
    (form(wav(1), prompt="x" * (1 << 19)), 413, "prompt is too large"),
    (form(bytes(18 << 20)), 413, ""),
]


async def test_what_cannot_be_heard_is_an_error_as_openai_has_them(server: tuple[InProcess, str]) -> None:
    async with aiohttp.ClientSession() as session:
        for number, (data, status, words) in enumerate(REFUSED):
            async with session.post(f"{server[1]}/v1/audio/transcriptions", data=data) as response:
                said = await response.text()
                assert (response.status, words in said) == (status, True), (number, response.status, said)


async def test_only_a_sound_may_be_as_large_as_a_sound(server: tuple[InProcess, str]) -> None:
    _, url = server
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        for path in ("completions", "chat/completions", "embeddings"):
            async with session.post(f"{url}/v1/{path}", data=io.BytesIO(bytes(2 << 20))) as response:
                assert response.status == 413


HEADS = [
    b'name="file"; filename="a"\r\nContent-Type: audio/\xff',
    b'name="file"; filename="speech.flac"\r\nContent-Type: audio/flac',
    b'name="file"; filename="upload"\r\nContent-Type: application/octet-stream',
    b'name="file"',
]


async def test_a_file_is_heard_whatever_it_is_called(server: tuple[InProcess, str]) -> None:
    model = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with aiohttp.ClientSession() as session:
        for head in HEADS:
            data = model + b"--b\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + wav(1) + b"\r\n--b--\r\n"
            async with session.post(f"{server[1]}/v1/audio/transcriptions", data=data, headers=headers) as response:
                assert response.status == 200, head
                assert "text" in await response.json()
