"""SIGKILL of workers that hold an encoder or a network for images beside the decoder: streams go on with the tokens of
an undisturbed run."""

import asyncio
import signal
from pathlib import Path
from typing import Any

from cluster import is_busy
from fleet_helpers import Fleet, Scale
from processes import Workers, scheduler, worker
from sounds import file_of, samples, wav
from tiny_encoder_decoder import ENGLISH, SILENT, SPEECH_START, WRITE, write_encoder_decoder, write_whisper
from tiny_image_models import make_model, picture

from pagewire_client import Client, EncoderPrompt, Image, SamplingParams, Sound
from pagewire_client.llm import collect
from pagewire_client.prompts import Part

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "n": 2},
    {"beam_width": 3},
    {"temperature": 0, "logprobs": 1, "repetition_penalty": 1.2},
]


async def outputs(client: Client, number: int) -> list[tuple[list[int], str]]:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **KINDS[number % len(KINDS)])
    completion = await collect(client, EncoderPrompt(f"Text {number}: " + "word " * (number % 14)), params)
    return [(output.token_ids, output.text) for output in completion.outputs]


async def test_what_an_encoder_has_read_on_a_lost_worker_is_read_again_on_another(tmp_path: Path, scale: Scale) -> None:
    for family in ("t5", "bart")[: scale(1, 2)]:
        model = write_encoder_decoder(tmp_path / family, family)
        workers, count = Workers(model), scale(8, 60)
        first, second = workers.up(2)
        member = scheduler(model, [first.address, second.address], "--check-invariants").start()
        try:
            async with Client(member.address, retry_for=0) as client:
                await client.wait_until_serving(60)
                expected = [await outputs(client, number) for number in range(count)]
                fleet = Fleet(member, client, [], {})
                streams = asyncio.gather(*(outputs(client, number) for number in range(count)))
                state = await fleet.until(lambda state: any(map(is_busy, state.workers)))
                busy = {worker.address for worker in state.workers if is_busy(worker)}
                await asyncio.to_thread((first if first.address in busy else second).kill)
                assert await streams == expected
                state = await fleet.check_empty()
                assert sum(worker.num_losses for worker in state.workers) > 0  # it was lost with streams
        finally:
            member.kill()
            workers.close()


async def seen(client: Client, number: int) -> list[list[int]]:
    """The tokens behind a prompt with two images, of which others have the first as well."""
    parts: list[Part] = [Image(picture(40, 16).data), [number], Image(picture(12, 40 + number % 3).data), [9]]
    params = SamplingParams(max_tokens=60, ignore_eos=True, **KINDS[number % len(KINDS)])
    return [output.token_ids for output in (await collect(client, parts, params)).outputs]


async def test_images_on_a_lost_worker_are_read_again_by_one_of_two_ranks(tmp_path: Path) -> None:
    model, count = make_model(tmp_path / "model", "qwen3_vl"), 12
    lost, ranked = worker(model), worker(model, "--tensor-parallel-size", "2")
    member = scheduler(model, [lost.address, ranked.address]).start()
    try:
        lost.start().wait_for("ready")
        async with Client(member.address, retry_for=0) as client:
            await client.wait_until_serving(60)
            expected = [await seen(client, number) for number in range(count)]
            await asyncio.to_thread(ranked.start().wait_for, "ready")
            fleet = Fleet(member, client, [], {})
            await fleet.until(lambda state: all(worker.connected for worker in state.workers))
            streams = asyncio.gather(*(seen(client, number) for number in range(count)))
            await fleet.until(lambda state: all(map(is_busy, state.workers)))
            lost.signal(signal.SIGKILL)
            assert await streams == expected
            state = await fleet.check_empty()
            assert [worker.num_losses for worker in state.workers] == [1, 0]
    finally:
        for one in (member, lost, ranked):
            one.kill()


LONG, SHORT = Sound(wav(40), "audio/wav"), Sound(file_of(samples(9, 1), "FLAC"), "audio/flac")


async def heard(client: Client, has_begun: asyncio.Event, sound: Sound, **options: Any) -> list[Any]:
    """All that a transcription says: text, tokens, times, and how much it took."""
    found = []
    async for event in client.transcribe(sound, language="en", **options):
        if event.HasField("segment"):
            has_begun.set()
        if event.HasField("end"):
            event.end.usage.ClearField("cached_tokens")
        found.append(event)
    return found


async def understood(client: Client, number: int) -> list[list[int]]:
    """What Generate says of a sound."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, **KINDS[number])
    prompt = EncoderPrompt(SHORT, (SPEECH_START, ENGLISH, WRITE, SILENT))
    return [output.token_ids for output in (await collect(client, prompt, params)).outputs]


async def test_what_is_said_in_a_sound_is_the_same_when_all_workers_are_killed_in_the_middle_of_it(
    tmp_path: Path,
) -> None:
    """Transcripts with their times, and what Generate says: greedily, drawn and of several outputs."""
    model = write_whisper(tmp_path / "whisper")
    workers = Workers(model, step_seconds=0.02)
    first, second = workers.up(2)
    member = scheduler(model, [first.address, second.address], "--check-invariants").start()
    try:
        async with Client(member.address, retry_for=0) as client:
            await client.wait_until_serving(60)

            async def all_said(has_begun: asyncio.Event) -> list[Any]:
                transcripts = (heard(client, has_begun, LONG), heard(client, has_begun, SHORT, temperature=0.8, seed=3))
                return await asyncio.gather(*transcripts, *(understood(client, number) for number in (0, 1, 3)))

            expected = await all_said(asyncio.Event())
            assert {event.segment.start_seconds // 30 for event in expected[0]} == {0, 1}
            has_begun = asyncio.Event()
            saying = asyncio.ensure_future(all_said(has_begun))
            await has_begun.wait()
            for worker in (first, second):
                worker.signal(signal.SIGKILL)
            for worker in (first, second):
                await asyncio.to_thread(worker.kill)  # which returns when it is gone
            await asyncio.to_thread(workers.up, 2)
            assert await saying == expected
            state = await Fleet(member, client, [], {}).check_empty()
            assert sum(worker.num_losses for worker in state.workers) > 0  # they were lost with streams
    finally:
        member.kill()
        workers.close()
