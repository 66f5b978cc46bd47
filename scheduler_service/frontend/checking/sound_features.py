"""Converts a request's sound to the encoder's features, on threads."""

import asyncio
import hashlib

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.core import EncoderInput
from scheduler_service.frontend.checking.checks import invalid
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.speech.log_mel import HOP, NUM_FRAMES, WINDOW, log_mel
from scheduler_service.frontend.speech.sound import SAMPLE_RATE, Samples, Sound
from scheduler_service.frontend.speech.sound_error import SoundError

BAND_BYTES = 4 * NUM_FRAMES
TOO_SHORT = "sound: data is shorter than 10 ms; send a longer sound"


async def read_sound(sound: pb.Sound, model: ServedModel) -> EncoderInput:
    """The features of a sound of at most one window (30 s). Raises RequestError."""
    opened = await open_sound(sound, WINDOW / SAMPLE_RATE)
    samples = await read_window(opened, 0)
    if len(samples) < HOP:
        invalid(TOO_SHORT)
    await read_window(opened, WINDOW)  # refuses a longer sound even if its header states a shorter length
    return await read_features(samples, model)


async def open_sound(sound: pb.Sound, max_seconds: float) -> Sound:
    try:
        return await asyncio.to_thread(lambda: Sound(sound.data, max_seconds))
    except SoundError as error:
        invalid(f"sound: {error}")


async def read_window(sound: Sound, start: int) -> Samples:
    try:
        return await asyncio.to_thread(sound.window, start, WINDOW)
    except SoundError as error:
        invalid(f"sound: {error}")


async def read_features(samples: Samples, model: ServedModel) -> EncoderInput:
    def compute() -> EncoderInput:
        features = log_mel(samples, model.feature_bytes // BAND_BYTES).astype("<f4").tobytes()
        digest = hashlib.sha256(features).digest()
        return EncoderInput(num_tokens=model.max_encoder_len, features=features, digest=digest)

    return await asyncio.to_thread(compute)
