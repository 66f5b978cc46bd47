"""Converts a sound in a prompt to the samples that a worker reads, on a thread: float32, 16,000 a second.

30 s take 1.9 MB, against 1.5 MB of features for every sound, however short. Workers compute the features in
transformers' code, while the device computes other steps.
"""

import asyncio
import hashlib
from collections.abc import Sequence

import numpy as np

from pagewire_common.sounds.families import SAMPLE_RATE, WINDOW
from scheduler_service.frontend.checking.checks import invalid
from scheduler_service.frontend.output.request_memory import WINDOW_BYTES, more_memory
from scheduler_service.frontend.speech.sound import Samples, Sound
from scheduler_service.frontend.speech.sound_error import SoundError


async def read_samples(name: str, data: bytes, most: int) -> tuple[bytes, int, bytes]:
    """A digest, the number of samples, and the samples of a sound of at most `most` samples, a multiple of `WINDOW`.
    Raises RequestError."""

    def join(windows: Sequence[Samples]) -> tuple[bytes, int, bytes]:
        found = np.concatenate(windows)[:most]
        samples = found.astype("<f4", copy=False).tobytes()
        return hashlib.sha256(b"sound " + samples).digest(), len(found), samples

    try:
        # One job for each window: a file of 0.4 MB can take 3 s of CPU time, and other requests need the threads, too.
        sound = await asyncio.to_thread(Sound, data, most / SAMPLE_RATE)
        windows = [await asyncio.to_thread(sound.window, 0, WINDOW)]
        while len(windows[-1]) == WINDOW and len(windows) * WINDOW <= most:
            # A window behind `most` is empty, or refuses the sound, whatever length its header states.
            if len(windows) * WINDOW < most:
                await more_memory.get()(WINDOW_BYTES)
            windows.append(await asyncio.to_thread(sound.window, len(windows) * WINDOW, WINDOW))
        return await asyncio.to_thread(join, windows)
    except SoundError as error:
        invalid(f"{name}: {error}")
