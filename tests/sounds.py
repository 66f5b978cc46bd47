"""Sounds without speech: tones and noise, in files of several kinds."""

import io
from functools import cache

import numpy as np
import numpy.typing as npt
import soundfile

RATE = 16_000


def samples(seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Noise that comes and goes, over a tone that rises."""
    draw = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    noise = draw.normal(size=len(time)) * np.sin(time * 3 + seed) ** 2
    return (0.1 * noise + 0.2 * np.sin(2 * np.pi * (200 + 40 * seed + 30 * time) * time)).astype(np.float32)


def file_of(
    sound: npt.NDArray[np.float32], kind: str = "WAV", subtype: str | None = "PCM_16", rate: int = RATE
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def container_of(
    sound: npt.NDArray[np.float32], kind: str, codec: str, rate: int = RATE, number: int = 1, **options: str
) -> bytes:
    """An MP4 or Matroska file of `number` equal sounds, by FFmpeg's names of format, encoder and options."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind, options=options) as container:
        streams = [container.add_stream(codec, rate=rate, layout="mono") for _ in range(number)]
        for stream in streams:
            frame = av.AudioFrame.from_ndarray(sound[None], format="flt", layout="mono")
            frame.sample_rate, frame.pts = rate, 0
            size = stream.codec_context.frame_size or 1024
            resampler = av.AudioResampler(stream.codec_context.format, "mono", rate, frame_size=size)
            for part in (*resampler.resample(frame), *resampler.resample(None), None):
                container.mux(stream.encode(part))
    return buffer.getvalue()


@cache
def two_hours() -> bytes:
    """Silence in 94 KiB, at the lowest supported rate, so that it is soon encoded."""
    return file_of(np.zeros(2 * 3600 * 4000, dtype=np.float32), "FLAC", rate=4000)


@cache
def two_hours_of_matroska() -> bytes:
    return container_of(np.zeros(2 * 3600 * 4000, dtype=np.float32), "matroska", "flac", 4000)


def without_length(flac: bytes) -> bytes:
    """The same sound with a header that does not state its length."""
    return flac[:21] + bytes([flac[21] & 0xF0, *bytes(4)]) + flac[26:]


def wav(seconds: float, seed: int = 0) -> bytes:
    return file_of(samples(seconds, seed))
