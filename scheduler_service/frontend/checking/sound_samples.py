"""Converts a sound in a prompt to the samples that a worker reads, on a thread: float32, 16,000 a second.

30 s take 1.9 MB, against 1.5 MB of features for every sound, however short. Workers compute the features in
transformers' code, while the device computes other steps.
"""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator

import numpy as np

from pagewire_common.sounds.families import SAMPLE_RATE, WINDOW
from scheduler_service.frontend.checking.checks import invalid
from scheduler_service.frontend.output.request_memory import WINDOW_BYTES, more_memory
from scheduler_service.frontend.speech.sound import Samples, Sound
from scheduler_service.frontend.speech.sound_error import SoundError


async def read_samples(name: str, data: bytes, most: int) -> tuple[bytes, int, bytes]:
    """A digest, the number of samples, and the samples of a sound of at most `most` samples, a multiple of `WINDOW`.
    Raises RequestError."""
    windows = [window async for window in _windows(name, data, most)]

    def join() -> tuple[bytes, int, bytes]:
        found = np.concatenate(windows)[:most]
        samples = found.astype("<f4", copy=False).tobytes()
        return hashlib.sha256(b"sound " + samples).digest(), len(found), samples

    return await asyncio.to_thread(join)


async def count_samples(name: str, data: bytes, most: int) -> int:
    """The number of samples of such a sound, of which one window is in memory at a time."""
    return min(sum([len(window) async for window in _windows(name, data, most)]), most)


async def _windows(name: str, data: bytes, most: int) -> AsyncIterator[Samples]:
    """The sound in windows, whose memory counts before they are decoded: all that its header states at once, so that
    requests that are too many together do not each hold a part. The first window has been counted."""
    try:
        # One job for each window: a file of 0.4 MB can take 3 s of CPU time, and other requests need the threads, too.
        sound = await asyncio.to_thread(Sound, data, most / SAMPLE_RATE)
        num_stated, num_counted = -(-round(sound.stated_seconds * SAMPLE_RATE) // WINDOW), 1
        for number in itertools.count():
            # A window behind `most` is empty, or refuses the sound, whatever length its header states.
            needed = min(max(num_stated, number + 1), most // WINDOW)
            if needed > num_counted:
                await more_memory.get()((needed - num_counted) * WINDOW_BYTES)
                num_counted = needed
            window = await asyncio.to_thread(sound.window, number * WINDOW, WINDOW)
            yield window
            if len(window) < WINDOW or number * WINDOW == most:
                return
    except SoundError as error:
        invalid(f"{name}: {error}")
