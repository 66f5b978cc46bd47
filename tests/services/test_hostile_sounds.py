"""Sounds that were made to do harm: each is refused in a sentence and bounded memory, and others are heard meanwhile.

Real services, with one front end, which therefore has all of them. `make soak` sends two thousand, a third of them with
changed bytes; `make test` each kind twice.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from cluster import front_ends, holds_blocks, until_idle
from hostile_requests import FINE, INSIDE, Code, changed
from sounds import container_of, file_of, samples, two_hours, two_hours_of_matroska, wav, without_length
from test_hostile import GROWTH, OPTIONS
from tiny_encoder_decoder import write_whisper

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, LocalServer, Sound

NUM_ATTACKERS = 3
"""With `make soak`; otherwise two. Each of them has one sound on the way at a time."""
REQUEST_MEMORY = 256 << 20
"""Bytes that calls may take at a time. Those of the largest sound are 57 MiB, so that there is always room for the
ordinary ones. A front end's memory may grow by these, and by what its allocator keeps of large requests."""

ORDINARY = [
    Sound(wav(2, 1), "audio/wav"),
    Sound(file_of(samples(3, 2), "FLAC"), "audio/flac"),
    Sound(file_of(samples(1, 3), "OGG", None), "audio/ogg"),
    Sound(container_of(samples(2, 4), "ipod", "aac")),
]


class Hostile(NamedTuple):
    """A sound, and what must be said of it."""

    data: bytes
    content_type: str
    words: str
    method: str = "Transcribe"
    code: grpc.StatusCode = Code.INVALID_ARGUMENT


@cache
def hostile() -> list[Hostile]:
    flac, mp3, ogg = (file_of(samples(20), kind, None) for kind in ("FLAC", "MP3", "OGG"))
    hours = np.zeros(2 * 3600 * 4000, dtype=np.float32)
    bomb = file_of(np.zeros((60 * 192_000, 8), dtype=np.float32), "FLAC", rate=192_000)  # 100 KB for 368 MB
    aac, opus = container_of(samples(20), "ipod", "aac"), container_of(samples(20), "webm", "libopus", 48_000)
    claims = wav(3)[:40] + (1 << 30).to_bytes(4, "little") + wav(3)[44:]
    return [
        Hostile(wav(20)[:100_000], "audio/wav", "data is cut off: its header says 640000 bytes of samples"),
        Hostile(flac[: len(flac) // 2], "audio/flac", "data is damaged or cut off"),
        Hostile(mp3[: len(mp3) // 2], "audio/mpeg", "data is damaged or cut off"),
        Hostile(ogg[: len(ogg) // 2], "audio/ogg", "data is cut off"),
        Hostile(ogg[:40_000] + ogg[50_000:], "audio/ogg", "data is damaged in page"),
        Hostile(claims, "audio/wav", "data is cut off: its header says 1073741824 bytes of samples"),
        Hostile(file_of(hours, "WAV", "IMA_ADPCM", 4000), "audio/wav", "data is a sound of 7200 s or more"),
        Hostile(file_of(hours, "WAV", "PCM_U8", 4000), "audio/wav", "larger than max", code=Code.RESOURCE_EXHAUSTED),
        Hostile(two_hours(), "audio/flac", "data is a sound of 7200 s or more"),
        Hostile(without_length(bomb), "audio/flac", "at most 30 s are allowed", "Generate"),
        Hostile(b"ID3\4\0\0\0\0\0\0" * 100_000 + mp3, "audio/mpeg", "data begins with more than 16 ID3 tags"),
        Hostile(
            file_of(samples(1), "AIFF"), "audio/wav", "data is AIFF; WAV, FLAC, MP3, OGG, MP4 and WebM are supported"
        ),
        Hostile(aac[: len(aac) // 2], "audio/mp4", "data is not a readable sound file"),
        Hostile(aac[:60_000] + bytes(20_000) + aac[80_000:], "audio/mp4", "data is damaged or cut off"),
        Hostile(opus[: len(opus) // 2], "audio/webm", "data is cut off: its header says"),
        Hostile(two_hours_of_matroska(), "video/webm", "data is a sound of 7200 s or more"),
        Hostile(container_of(samples(1), "mp4", "aac", number=2), "video/mp4", "data has 2 sounds; send"),
        Hostile(aac[:64] + random.Random(2).randbytes(1 << 20), "audio/mp4", "data is not a readable sound file"),
        Hostile(random.Random(1).randbytes(1 << 20), "audio/mpeg", "data is not a readable sound file"),
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = write_whisper(tmp_path_factory.mktemp("models") / "whisper")
    pool = ("--block-size", "16", "--num-gpu-blocks-override", "800", "--swap-space", "0")
    scheduling = ("--request-memory", str(REQUEST_MEMORY / 2**30), "--frontends", "1", "--check-invariants")
    with LocalServer(
        str(model), worker_arguments=[*pool, "--threads", "1", "--dtype", "float32"], scheduler_arguments=scheduling
    ) as server:
        yield server


async def heard(client: Client, sound: Sound) -> list[Any]:
    """The language of a sound, and its segments: tokens, text, and times."""
    return [event for event in [event async for event in client.transcribe(sound)] if not event.HasField("end")]


async def send(channel: grpc.aio.Channel, one: Hostile, data: bytes) -> tuple[grpc.StatusCode, str]:
    sound = pb.Sound(data=data, content_type=one.content_type)
    request = (
        pb.TranscribeRequest(sound=sound)
        if one.method == "Transcribe"
        else pb.GenerateRequest(encoder_sound=sound, sampling=pb.SamplingParams(max_tokens=1))
    )
    call: Any = channel.unary_stream(f"/pagewire.v1.InferenceService/{one.method}")(request.SerializeToString())
    try:
        async for _ in call:
            pass
        return await call.code(), ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""


def peak(process_id: int) -> int:
    """The most bytes that a process has had in memory."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the peak of memory")
async def test_sounds_that_are_meant_to_do_harm_are_refused_and_change_nothing_for_an_ordinary_client(
    server: LocalServer, request: pytest.FixtureRequest
) -> None:
    soaks = request.config.getoption("--soak")
    number = 30 if soaks else 1
    found = Counter[tuple[str, str]]()

    async def attack(channel: grpc.aio.Channel, draw: random.Random) -> None:
        for place, one in enumerate(draw.sample(hostile() * number, len(hostile()) * number)):
            code, details = await send(channel, one, one.data)
            assert (code, one.words in details) == (one.code, True), (one.words, code, details)
            assert not INSIDE.search(details)
            found[one.words, code.name] += 1
            if soaks and place % 2:
                code, details = await send(channel, one, changed(draw, one.data[: 64 << 10]))
                assert code in FINE, (one.words, code, details)
                assert not INSIDE.search(details)
                found["changed bytes", code.name] += 1

    async with Client(server.target, retry_for=0) as client:
        await client.wait_until_serving(60)
        expected = [await heard(client, sound) for sound in ORDINARY]
        alone, beside = [], []  # seconds

        async def hear_as_alone(times: list[float]) -> None:
            for sound, events in zip(ORDINARY, expected, strict=True):
                began = time.perf_counter()
                assert await heard(client, sound) == events
                times.append(time.perf_counter() - began)

        for _ in range(number if soaks else 1):
            await hear_as_alone(alone)
        (front_end,) = front_ends(server.target)
        before = peak(front_end.pid)
        channels = [
            grpc.aio.insecure_channel(server.target, options=OPTIONS) for _ in range(NUM_ATTACKERS if soaks else 2)
        ]
        attacks = asyncio.gather(*(attack(channel, random.Random(n)) for n, channel in enumerate(channels)))
        while not attacks.done():
            await hear_as_alone(beside)
        await attacks
        for channel in channels:
            await channel.close()
    grown = peak(front_end.pid) - before
    state = await until_idle(server.admin_target)
    assert not any(holds_blocks(worker) or worker.num_losses for worker in state.workers)
    if soaks:
        medians = [sorted(times)[len(times) // 2] for times in (alone, beside)]
        ordinary = f"an ordinary sound's median {medians[0]:.3f} s alone, {medians[1]:.3f} s beside the others"
        kept = front_end.memory_info().rss - before
        print(f"\n{dict(found)}\nMiB grown: {grown >> 20} at most, {kept >> 20} at the end; {ordinary}")  # noqa: T201
    assert grown < REQUEST_MEMORY + GROWTH
