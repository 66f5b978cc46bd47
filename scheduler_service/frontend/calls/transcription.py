"""Serves Transcribe calls, in windows of 30 seconds. The text of a window determines where the next one starts."""

import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import PatientWriter, RequestError
from pagewire_common.calls.request_limits import request_size
from pagewire_common.sampling import NUMBERS
from scheduler_service.core import EncoderInput, PoolingParams, PoolingType
from scheduler_service.frontend.calls.generation import Context
from scheduler_service.frontend.calls.parted_call import PartedCall
from scheduler_service.frontend.checking.checks import check_characters, check_context, invalid
from scheduler_service.frontend.checking.sound_features import TOO_SHORT, open_sound, read_features, read_window
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.output.request_memory import SOUND_BYTES, sound_bytes
from scheduler_service.frontend.output.request_trace import TRANSCRIPTION
from scheduler_service.frontend.speech.languages import code_of
from scheduler_service.frontend.speech.log_mel import HOP
from scheduler_service.frontend.speech.sound import SAMPLE_RATE
from scheduler_service.frontend.speech.speech_tokens import SECONDS_PER_TIMESTAMP, SpeechTokens
from scheduler_service.frontend.speech.transcript import Segment, Transcript
from scheduler_service.frontend.speech.words import Word, timed_words
from scheduler_service.wire.sampling import RequestSampling

MIN_STEP = SAMPLE_RATE
"""Smallest number of samples between two windows: the model invents text that ends within a window's first second."""
SAMPLES_PER_TOKEN = round(SAMPLE_RATE * SECONDS_PER_TIMESTAMP)
"""Samples of sound for each position of the encoder's output."""
MAX_SECONDS = 3600.0
MAX_PROMPT_CHARACTERS = 1 << 16
PREVIOUS = "<|startofprev|>"
"""Marks the following tokens of a decoder's prompt as earlier text."""
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""The silence token's name, in newer and in older models."""


async def transcribe(link: EngineLink, request: pb.TranscribeRequest, context: Context) -> None:
    async with _SpeechCall(link, request, context) as call:
        writer = PatientWriter(context, link.stall_timeout)
        try:
            async with aclosing(call.events(writer)) as events:
                async for response in events:
                    await writer.write(response)
        finally:
            writer.close()


class _SpeechCall(PartedCall):
    event, operation, later_bytes = "transcription closed", TRANSCRIPTION, SOUND_BYTES

    def __init__(self, link: EngineLink, request: pb.TranscribeRequest, context: Context) -> None:
        super().__init__(link, request, context, sound_bytes(request.sound, request_size.get()))
        self._speech = request
        self._seconds = 0.0

    def _check(self) -> None:
        if not (bounds := NUMBERS["temperature"].bounds).hold(self._speech.temperature):
            invalid(f"temperature is {self._speech.temperature}; it must be {bounds}")
        check_characters("prompt", self._speech.prompt, MAX_PROMPT_CHARACTERS)

    def _figures(self) -> dict[str, Any]:
        return {
            "num_windows": self._num_parts,
            "sound_seconds": self._seconds,
            "output_tokens": [self.num_output_tokens],
        }

    async def events(self, writer: PatientWriter) -> AsyncGenerator[pb.TranscribeResponse]:
        request, model = self._speech, self.model
        tokens = model.speech_tokens
        if tokens is None:
            raise RequestError(grpc.StatusCode.UNIMPLEMENTED, f"{model.name} does not transcribe")
        task = "translate" if request.translate else "transcribe"
        self._check_asked(tokens, task)
        seed = request.seed if request.HasField("seed") else secrets.randbits(63)
        sound = await open_sound(request.sound, MAX_SECONDS)
        before = await self._tokens_before()
        language, start = code_of(request.language) or tokens.language, 0
        while len(samples := await read_window(sound, start)) >= HOP:
            features = await read_features(samples, model)
            if not language and tokens.languages:
                language = await self._find_language(features, tokens)
            if not start and language:
                yield pb.TranscribeResponse(language=language)
            transcript = Transcript(tokens.transcript, len(samples) / SAMPLE_RATE)
            begins = start / SAMPLE_RATE
            known = () if start else before
            prompt = tokens.prompt(language, task, known)
            check_context("what the text begins with", len(prompt), model)
            silence = await self._find_silence((*known, tokens.start), features) if request.scores else None
            sampling = RequestSampling(
                max_tokens=min(model.context_length // 2, model.context_length - len(prompt)),
                temperature=request.temperature,
                seed=seed,
                eos_token_ids=frozenset(model.eos_token_ids),
                logprobs=0 if request.scores else None,
                transcript=tokens.transcript,
            )
            kept: list[Segment] = []  # wait for the times of their words, which one request computes for all
            async with self.part(self._num_parts, prompt, sampling, features) as state:
                state.stream.when_cut = writer.give_up
                async for delta in state.stream:
                    logprobs: list[float | None] = [entry.logprobs[0] for entry in delta.logprobs]
                    logprobs = logprobs or [None] * len(delta.token_ids)
                    for segment in filter(None, map(transcript.gain, delta.token_ids, logprobs)):
                        if request.words:
                            kept.append(segment)
                        else:
                            yield await self._encode(segment, begins, silence)
            if (rest := transcript.rest) is not None:
                kept.append(rest)
            times = None
            if request.words and kept:
                plain = tokens.plain_prompt(language, task)
                times = await self._find_times(plain, kept, features, len(samples), writer)
            for segment in kept:
                words = []
                if times is not None:
                    own, times = times[: len(segment.token_ids) + 1], times[len(segment.token_ids) :]
                    words = timed_words(segment, own, language, await self._prefixes(segment))
                yield await self._encode(segment, begins, silence, words)
            start += max(round(transcript.next * SAMPLE_RATE), MIN_STEP)
            self._seconds = sound.seconds
        if not start:
            invalid(TOO_SHORT)
        usage = pb.Usage(
            prompt_tokens=self.num_tokens, cached_tokens=self.num_cached_tokens, output_tokens=self.num_output_tokens
        )
        yield pb.TranscribeResponse(end=pb.TranscriptEnd(seconds=sound.seconds, usage=usage))

    def _check_asked(self, tokens: SpeechTokens, task: str) -> None:
        language = self._speech.language
        if language and code_of(language) not in tokens.languages:
            known = ", ".join(sorted(tokens.languages))
            may_be = f"{known}, or the name of one of them" if known else "nothing: it knows one language"
            invalid(f"language is {language[:32]!r}; with this model it may be {may_be}")
        if task != "transcribe" and task not in tokens.tasks:
            invalid("translate is set, and this model does not translate")
        if self._speech.words and not tokens.aligns:
            invalid(
                f"words is set, and the generation_config.json of {self.model.name} names no alignment_heads, which "
                "give the times of words"
            )
        if self._speech.words and self.model.tokenizer is None:
            invalid(f"words is set, and {self.model.name} has no tokenizer, which finds the words")

    async def _tokens_before(self) -> Sequence[int]:
        """The last tokens of the client's prompt, up to half of the model's context."""
        text, tokenizer = self._speech.prompt.strip(), self.model.tokenizer
        if not text:
            return ()
        previous = None if tokenizer is None else tokenizer.token_id(PREVIOUS)
        if tokenizer is None or previous is None:
            invalid(f"prompt is not possible with this model: its tokenizer has no {PREVIOUS}")
        token_ids = await tokenizer.encode_alone(f" {text}")
        return (previous, *token_ids[1 - self.model.context_length // 2 :])

    async def _find_language(self, features: EncoderInput, tokens: SpeechTokens) -> str:
        """The likeliest language of a window, whose encoder result stays cached for the next request."""
        codes = {token_id: code for code, token_id in tokens.languages.items()}
        sampling = RequestSampling(max_tokens=1, allowed_token_ids=sorted(codes))
        found = next(iter(codes))
        async with self.part(self._num_parts, (tokens.start,), sampling, features) as state:
            async for delta in state.stream:
                found = next(iter(delta.token_ids), found)
        return codes[found]

    async def _find_silence(self, prompt: Sequence[int], features: EncoderInput) -> float | None:
        """The probability of the silence token, before the request's restriction to this token."""
        tokenizer = self.model.tokenizer
        found = (tokenizer.token_id(name) for name in NO_SPEECH) if tokenizer is not None else iter(())
        if (token_id := next((token for token in found if token is not None), None)) is None:
            return None
        sampling = RequestSampling(max_tokens=1, allowed_token_ids=[token_id], logprobs=0)
        silence = None
        async with self.part(self._num_parts, prompt, sampling, features) as state:
            async for delta in state.stream:
                for entry in delta.logprobs:
                    silence = math.exp(entry.logprobs[0])
        return silence

    async def _find_times(
        self,
        plain: Sequence[int],
        segments: Sequence[Segment],
        features: EncoderInput,
        num_samples: int,
        writer: PatientWriter,
    ) -> Sequence[float]:
        """The start of each token and the end of the last token, in seconds from the window's start.

        The model's alignment heads follow the sound only for a prompt without timestamps.
        """
        prompt = [*plain, *(token_id for segment in segments for token_id in segment.token_ids)]
        check_context("a window's text, whose words are to be timed,", len(prompt), self.model)
        pooling = PoolingParams(
            type=PoolingType.ALIGNMENT,
            dimensions=1 + len(prompt) - len(plain),
            num_sound_tokens=max(1, num_samples // SAMPLES_PER_TOKEN),
        )
        found = b""
        sampling = RequestSampling(max_tokens=1, pooling=pooling)
        async with self.part(self._num_parts, prompt, sampling, features) as state:
            state.stream.when_cut = writer.give_up
            async for delta in state.stream:
                found += delta.vectors
        times: Sequence[float] = (np.frombuffer(found, "<f4").astype(float) * SECONDS_PER_TIMESTAMP).tolist()
        return times

    async def _prefixes(self, segment: Segment) -> Sequence[str]:
        assert self.model.tokenizer is not None  # calls with `words` are refused without a tokenizer
        return await self.model.tokenizer.decode_prefixes(segment.token_ids)

    async def _encode(
        self, segment: Segment, begins: float, silence: float | None, words: Sequence[Word] = ()
    ) -> pb.TranscribeResponse:
        tokenizer = self.model.tokenizer
        text = "" if tokenizer is None else await tokenizer.decode(segment.token_ids, skip_special_tokens=True)
        return pb.TranscribeResponse(
            segment=pb.TranscriptSegment(
                start_seconds=begins + segment.start,
                end_seconds=begins + segment.end,
                text=text,
                token_ids=segment.token_ids,
                window_start_seconds=begins,
                mean_logprob=segment.mean_logprob,
                no_speech_probability=silence,
                words=[
                    pb.TranscriptWord(text=text, start_seconds=begins + start, end_seconds=begins + end)
                    for text, start, end in words
                ],
            )
        )
