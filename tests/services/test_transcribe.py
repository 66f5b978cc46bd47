"""Transcribe, with a model that hears and understands nothing: what it writes down is random, and always the same."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from embedding_helpers import assert_nothing_is_left, said_through_a_loss, serving
from engines import until
from scheduler_in_process import scheduler
from sounds import file_of, samples, two_hours, wav
from tiny_encoder_decoder import (
    ENGLISH,
    FIRST_TIME,
    GENERATION,
    GERMAN,
    NO_SPEECH,
    PREVIOUS,
    SILENT,
    SPEECH_END,
    SPEECH_START,
    TRANSLATE,
    WRITE,
    write_whisper,
)
from worker_in_process import slow_down, worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, EncoderPrompt, SamplingParams, Sound
from pagewire_client.llm import collect
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.core import TranscriptParams
from scheduler_service.frontend.calls import transcription
from scheduler_service.frontend.checking.sound_features import read_window
from scheduler_service.frontend.speech.log_mel import log_mel
from scheduler_service.frontend.speech.transcript import Transcript

BLOCKS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 400}
"""What an encoder reads takes 94 of them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("models") / "whisper")


class SlowWhisper:
    """The checkpoint as transformers computes it, a token at a time, with its own rules for transcripts."""

    def __init__(self, path: Path) -> None:
        from transformers import GenerationConfig, WhisperForConditionalGeneration
        from transformers.generation.logits_process import (
            SuppressTokensAtBeginLogitsProcessor,
            SuppressTokensLogitsProcessor,
            WhisperTimeStampLogitsProcessor,
        )

        self._network: Any = WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
        config = GenerationConfig(**GENERATION)
        self._rules: Any = lambda length: [
            SuppressTokensLogitsProcessor(GENERATION["suppress_tokens"]),
            SuppressTokensAtBeginLogitsProcessor(GENERATION["begin_suppress_tokens"], length),
            WhisperTimeStampLogitsProcessor(config, begin_index=length),
        ]

    def tokens(self, sound: Any, prompt: Sequence[int], most: int, *, with_rules: bool = True) -> list[int]:
        features = torch.from_numpy(log_mel(sound, 80))[None]
        found = list(prompt)
        with torch.inference_mode():
            states = self._network.model.encoder(features)
            while len(found) < len(prompt) + most and found[-1] != SPEECH_END:
                ids = torch.tensor([found])
                scores = self._network(encoder_outputs=states, decoder_input_ids=ids).logits[:, -1]
                for rule in self._rules(len(prompt)) if with_rules else ():
                    scores = rule(ids, scores)
                found.append(int(scores.argmax()))
        return found[len(prompt) :]

    def logprobs(self, sound: Any, token_ids: Sequence[int]) -> Any:
        """Behind each of these tokens, of every token of the vocabulary."""
        features = torch.from_numpy(log_mel(sound, 80))[None]
        with torch.inference_mode():
            found = self._network(input_features=features, decoder_input_ids=torch.tensor([token_ids])).logits[0]
        return found.log_softmax(-1)


async def events(client: Client, data: bytes, content_type: str = "audio/wav", **options: Any) -> list[Any]:
    return [event async for event in client.transcribe(Sound(data, content_type), **options)]


def segments(found: list[Any]) -> list[Any]:
    return [event.segment for event in found if event.HasField("segment")]


async def test_tokens_are_those_of_transformers(model: Path) -> None:
    """Of a window with its times, in a language that is named or found out; and of any prompt without rules."""
    slow, sound = SlowWhisper(model), samples(30, 1)
    async with serving(model, **BLOCKS) as (one, _), Client(one.target) as client:
        for options, task in (({"language": "de"}, WRITE), ({"language": "en", "translate": True}, TRANSLATE)):
            prompt = [SPEECH_START, GERMAN if options["language"] == "de" else ENGLISH, task]
            expected = slow.tokens(sound, prompt, 32)
            found = await events(client, file_of(sound, subtype="FLOAT"), **options)
            assert found[0].language == options["language"]
            transcript = Transcript(TranscriptParams(first_timestamp=FIRST_TIME, num_text_tokens=SPEECH_END), 30.0)
            first_window = [*filter(None, map(transcript.gain, expected))]
            assert len(first_window) >= 2
            for one, other in zip(first_window, segments(found), strict=False):
                assert (one.token_ids, one.start, one.end) == (
                    other.token_ids,
                    pytest.approx(other.start_seconds),
                    pytest.approx(other.end_seconds),
                )
        for text in ("Houston, ", "we have a problem " * 10):
            bytes_before = [*f" {text.strip()}".encode()][-31:]
            ids = await client.tokenize(bytes(bytes_before).decode())
            prompt = [PREVIOUS, *ids, SPEECH_START, GERMAN, WRITE]
            expected = slow.tokens(sound, prompt, 64 - len(prompt))
            found = await events(client, file_of(sound, subtype="FLOAT"), language="de", prompt=text)
            transcript = Transcript(TranscriptParams(first_timestamp=FIRST_TIME, num_text_tokens=SPEECH_END), 30.0)
            first_window = [*filter(None, map(transcript.gain, expected))]
            assert first_window
            assert [one.token_ids for one in first_window] == [
                [*other.token_ids] for other in segments(found)[: len(first_window)]
            ]
        (language,) = {event.language for event in await events(client, wav(2)) if event.language}
        assert language in ("en", "de")
        prompt = [SPEECH_START, 7, 90, SILENT]
        file = Sound(file_of(sound, subtype="FLOAT"), "audio/wav")
        params = SamplingParams(max_tokens=20, temperature=0)
        completion = await collect(client, EncoderPrompt(file, prompt), params)
        assert completion.outputs[0].token_ids == slow.tokens(sound, prompt, 20, with_rules=False)


async def test_scores_are_those_of_transformers(model: Path) -> None:
    """Of the first window, whose segments follow each other with a token for each time."""
    slow, sound, prompt = SlowWhisper(model), samples(30, 1), [SPEECH_START, GERMAN, WRITE]
    tokens = slow.tokens(sound, prompt, 32)
    expected = slow.logprobs(sound, [*prompt, *tokens])
    async with serving(model, **BLOCKS) as (one, _), Client(one.target) as client:
        found = segments(await events(client, file_of(sound, subtype="FLOAT"), language=" GERMAN", scores=True))
        plain = segments(await events(client, file_of(sound, subtype="FLOAT"), language="de"))
    assert [segment.token_ids for segment in found] == [segment.token_ids for segment in plain]
    assert not any(one.HasField("mean_logprob") or one.HasField("no_speech_probability") for one in plain)
    first_window = [segment for segment in found if not segment.window_start_seconds]
    assert len(first_window) >= 2
    position = 0
    for segment in first_window:
        assert segment.no_speech_probability == pytest.approx(float(expected[0, NO_SPEECH].exp()), rel=1e-3)
        while tokens[position : position + len(segment.token_ids)] != list(segment.token_ids):
            position += 1
        ids = tokens[position : position + len(segment.token_ids)]
        logprobs = [float(expected[len(prompt) - 1 + position + n, id_]) for n, id_ in enumerate(ids)]
        assert segment.mean_logprob == pytest.approx(sum(logprobs) / len(logprobs), rel=1e-3)
        position += len(ids)


async def test_words_are_said_one_after_the_other_within_their_segments(model: Path) -> None:
    """Asking for their times changes nothing else, and counts."""
    async with serving(model, **BLOCKS) as (one, _), Client(one.target) as client:
        plain = await events(client, wav(33, 3), language="en")
        found = await events(client, wav(33, 3), language="en", words=True)
        await assert_nothing_is_left(one)
    timed = segments(found)
    assert [one.text for one in timed] == [one.text for one in segments(plain)]
    assert {one.window_start_seconds > 0 for one in timed} == {True, False}
    for segment in timed:
        assert "".join(word.text for word in segment.words) == segment.text
        times = [time for word in segment.words for time in (word.start_seconds, word.end_seconds)]
        assert [segment.start_seconds, *times, segment.end_seconds] == sorted(
            [segment.start_seconds, *times, segment.end_seconds]
        )
    assert len({word.start_seconds for segment in timed for word in segment.words}) > 2
    assert found[-1].end.usage.prompt_tokens > plain[-1].end.usage.prompt_tokens + 1500


async def test_a_model_without_alignment_heads_refuses_times_of_words_by_name(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path / "whisper")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | {"alignment_heads": None}))
    async with serving(folder, **BLOCKS) as (one, _), Client(one.target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await events(client, wav(1), words=True)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the generation_config.json of whisper names no alignment_heads" in str(error.value.details())
        assert segments(await events(client, wav(1)))
        await assert_nothing_is_left(one)


async def test_a_long_sound_is_heard_window_by_window_to_its_end(model: Path) -> None:
    async with serving(model, **BLOCKS) as (one, _), Client(one.target) as client:
        found = await events(client, wav(70), language="en")
        await assert_nothing_is_left(one)
    *_, last = found
    assert last.end.seconds == pytest.approx(70)
    assert last.end.usage.prompt_tokens >= 3 * 3
    starts = [segment.start_seconds for segment in segments(found)]
    assert starts == sorted(starts)
    assert max(starts) > 60
    assert all(segment.start_seconds <= segment.end_seconds <= 70.01 for segment in segments(found))
    assert all(segment.text for segment in segments(found))


SOUNDS = [
    (wav(3, 1), {}),
    (wav(8, 2), {"language": "de"}),
    (wav(31, 3), {"words": True}),
    (wav(5, 4), {"temperature": 0.8, "seed": 3}),
]


async def heard(client: Client, number: int) -> list[Any]:
    """What is said when, words included."""
    data, options = SOUNDS[number]
    said = [of for one in segments(await events(client, data, **options)) for of in (one, *one.words)]
    return [(one.start_seconds, one.end_seconds, one.text) for one in said]


async def all_heard(client: Client) -> list[list[Any]]:
    return await asyncio.gather(*(heard(client, number) for number in range(len(SOUNDS))))


async def test_transcripts_are_the_same_alone_and_together_swapped_and_through_the_loss_of_a_worker(
    model: Path,
) -> None:
    async with serving(model, {"prefix_caching": False}, **BLOCKS) as (one, _), Client(one.target) as client:
        alone = [await heard(client, number) for number in range(len(SOUNDS))]
    small = BLOCKS | {"num_gpu_blocks_override": 197, "swap_space": 0.1}  # two, and a little
    async with serving(model, {"preemption_mode": "swap"}, **small) as (one, _), Client(one.target) as client:
        assert await all_heard(client) == alone
        assert await all_heard(client) == alone
        await assert_nothing_is_left(one)
    assert await said_through_a_loss(model, all_heard, **BLOCKS) == alone


async def test_a_worker_that_is_lost_between_two_windows_is_not_missed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker_in_process(model, **BLOCKS) as first, worker_in_process(model, **BLOCKS) as second:
        served = {worker.address: worker for worker in (first, second)}
        async with scheduler(*served, model=str(model), check_invariants=True) as one, Client(one.target) as client:
            await until(lambda: len(one.engine.workers.serving) == 2)
            expected = segments(await events(client, wav(70), language="en"))
            lost = []

            async def read_and_lose(sound: Any, start: int) -> Any:
                """The worker that had the window before."""
                if start and not lost:
                    before = max(one.engine.workers.all, key=lambda worker: worker.num_steps)
                    lost.append(before)
                    await served[before.client.address].server.server.stop(None)
                return await read_window(sound, start)

            monkeypatch.setattr(transcription, "read_window", read_and_lose)
            assert segments(await events(client, wav(70), language="en")) == expected
            assert [worker.num_losses for worker in lost] == [1]
            await assert_nothing_is_left(one)


REFUSED: dict[str, tuple[bytes | Callable[[], bytes], str, dict[str, Any], str]] = {
    "cut off": (wav(20)[:100_000], "audio/wav", {}, "sound: data is cut off"),
    "another type": (file_of(samples(1), "AIFF"), "audio/wav", {}, "sound: data is AIFF"),
    "language": (wav(1), "audio/wav", {"language": "xx"}, "language is 'xx'; with this model it may be de, en"),
    "nothing": (wav(0), "audio/wav", {}, "sound: data is shorter than 10 ms"),
    "temperature": (wav(1), "audio/wav", {"temperature": -1.0}, "temperature is -1.0; it must be in [0, 100]"),
    "hours": (two_hours, "audio/flac", {}, "7200 s or more"),
}


async def test_sounds_that_cannot_be_heard_are_refused_in_a_sentence_and_leave_nothing(model: Path) -> None:
    async with serving(model, **BLOCKS) as (one, _), Client(one.target) as client:
        for data, content_type, options, words in REFUSED.values():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await events(client, data if isinstance(data, bytes) else data(), content_type, **options)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in str(error.value.details())
        for request, words in (
            (
                pb.GenerateRequest(encoder_sound=pb.Sound(data=wav(0), content_type="audio/wav")),
                "sound: data is shorter than 10 ms",
            ),
            (
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(500, 1000)), encoder_text="x" * (2 << 20)),
                "bytes; at most 1048576 are allowed here",
            ),
            (pb.GenerateRequest(encoder_text="a"), "encoder_text is not what the encoder of whisper reads"),
            (pb.GenerateRequest(text="a"), "encoder_sound is missing"),
            (
                pb.GenerateRequest(encoder_sound=pb.Sound(data=wav(31), content_type="audio/wav")),
                "sound: data is a sound of 31 s or more; at most 30 s are allowed",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in client._stub.Generate(request):
                    pass
            assert words in str(error.value.details())
        await assert_nothing_is_left(one)


async def test_a_call_that_its_client_leaves_frees_what_it_held(model: Path) -> None:
    async with serving(model, **BLOCKS) as (one, worker), Client(one.target) as client:
        slow_down(worker, 0.05)
        async for event in client.transcribe(Sound(wav(60), "audio/wav")):
            assert event.language
            break
        await assert_nothing_is_left(one)


async def test_an_api_key_is_charged_for_what_is_heard_and_what_is_written(model: Path) -> None:
    key = ApiKey(id="one", digest=digest_of("secret"), tenant="t", tokens_per_minute=4000)
    async with (
        serving(model, {"keyring": Keyring([key])}, **BLOCKS) as (one, _),
        Client(one.target, api_key="secret", retry_for=0) as client,
    ):
        *_, last = await events(client, wav(20, 1), language="en")
        await assert_nothing_is_left(one)
        usage, used = last.end.usage, one.engine.requests.admission.quotas._uses["one"].tokens._used
        assert usage.output_tokens > 3
        assert used == usage.prompt_tokens + usage.output_tokens > 1500


async def test_a_model_that_does_not_hear_says_so(tiny_model_directory: Path) -> None:
    async with serving(tiny_model_directory) as (one, _), Client(one.target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await events(client, wav(1))
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---- from tokens to segments

PARAMS = TranscriptParams(first_timestamp=100, num_text_tokens=90)


def _transcript(token_ids: list[int], seconds: float = 30.0) -> tuple[list[tuple[float, float, list[int]]], float]:
    transcript = Transcript(PARAMS, seconds)
    found = [*filter(None, map(transcript.gain, token_ids)), *filter(None, [transcript.rest])]
    return [(one.start, one.end, one.token_ids) for one in found], transcript.next


@pytest.mark.parametrize(
    ("token_ids", "expected", "following"),
    [
        ([100, 1, 2, 150, 150, 3, 200], [(0.0, 1.0, [1, 2]), (1.0, 2.0, [3])], 30.0),
        ([100, 1, 150, 160, 3, 4], [(0.0, 1.0, [1])], 1.0),
        ([100, 1, 150, 160], [(0.0, 1.0, [1])], 1.0),
        ([110, 1, 2], [(0.2, 30.0, [1, 2])], 30.0),
        ([110, 95], [], 30.0),
        ([], [], 30.0),
        ([100, 1, 1600], [(0.0, 30.0, [1])], 30.0),
    ],
    ids=["complete", "goes on", "begins", "does not end", "nothing", "no tokens", "beyond the end"],
)
def test_text_between_times_is_a_segment_and_what_goes_on_is_left_to_the_next_window(
    token_ids: list[int], expected: list[tuple[float, float, list[int]]], following: float
) -> None:
    found, next_window = _transcript(token_ids)
    assert [(pytest.approx(start), pytest.approx(end), ids) for start, end, ids in expected] == found
    assert next_window == pytest.approx(following)
