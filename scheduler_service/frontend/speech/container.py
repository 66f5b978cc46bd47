"""Decodes the sound of an MP4 or WebM file in small blocks, with FFmpeg (PyAV).

For safety, FFmpeg may use only the demuxer that the file's header selects and a few common decoders, and read only this
file's bytes.
"""

import io
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from scheduler_service.frontend.speech.sound_error import SoundError, broken, unreadable

CODECS = ("aac", "opus", "vorbis", "mp3float", "flac", "alac")
_MAX_STREAMS = 16
_MAX_FRAME_SAMPLES = 1 << 17
"""Samples of a packet. For a malicious header (16 million samples of 8 channels), FFmpeg would reserve 512 MB."""
_MAX_PACKETS = 1 << 19
"""Packets of a file. An hour of AAC at 48,000 samples a second has 168,750; a malicious file may have millions."""


_MIN_SAMPLE_BYTES = 8
"""Bytes that a file must have for each sample of its MP4 fragments. Real samples (frames of AAC) have at least 100.
FFmpeg reserves 36 bytes a claimed sample: a file of 10 KB could claim 2^26 samples and take 2.4 GB.
"""


def _check_fragments(data: bytes) -> None:
    """Refuse an MP4 file whose fragments (each `trun` in its bytes) claim more samples than it can hold."""
    if b"moof" not in data:
        return
    num_samples, place = 0, data.find(b"trun")
    while place >= 0:
        num_samples += int.from_bytes(data[place + 8 : place + 12], "big")
        place = data.find(b"trun", place + 4)
    if num_samples > len(data) // _MIN_SAMPLE_BYTES:
        raise SoundError(f"data has fragments of {num_samples} samples, for which it has too few bytes")


class Container:
    """An opened MP4 or WebM file. `frames`: samples, if the header states the length. Raises SoundError."""

    def __init__(self, data: bytes, demuxer: str) -> None:
        _check_fragments(data)
        try:
            self._container = av.open(
                io.BytesIO(data),
                "r",
                format=demuxer,
                container_options={
                    "codec_whitelist": ",".join(CODECS),
                    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm",
                    "protocol_whitelist": "",
                    "max_streams": str(_MAX_STREAMS),
                },
                metadata_errors="ignore",
            )
        except (av.FFmpegError, ValueError):
            raise unreadable() from None
        sounds = self._container.streams.audio
        if len(sounds) != 1:
            raise SoundError(f"data has {len(sounds)} sounds; send a file with one")
        self._stream = stream = sounds[0]
        codec = stream.codec_context  # None without a decoder for the stream
        if codec is None or codec.name not in CODECS:
            name = "an unknown codec" if codec is None else codec.name
            raise SoundError(
                f"data has a sound in {name}; {', '.join(CODECS).replace('mp3float', 'mp3')} are supported"
            )
        codec.thread_count = 1
        codec.options = {"max_samples": str(_MAX_FRAME_SAMPLES), "err_detect": "explode"}
        self._num_read = 0
        self.samplerate = 0
        self._blocks = self._decoded()
        self._rest = next(self._blocks, None)
        if self._rest is None:
            raise SoundError("data has a sound of no length")
        self.channels = self._rest.shape[1]
        self.frames = self._said_frames()

    def _said_frames(self) -> int | None:
        stream, container = self._stream, self._container
        if stream.duration is not None and stream.time_base is not None:
            return round(stream.duration * stream.time_base * self.samplerate)
        if container.duration is not None and len(container.streams) == 1:
            return round(container.duration * self.samplerate / 1_000_000)
        return None

    def read(self, length: int) -> npt.NDArray[np.float32]:
        """The next `length` samples, or the remaining ones: [num_samples, num_channels]."""
        blocks, count = [], 0
        while self._rest is not None and count < length:
            blocks.append(self._rest[: length - count])
            count += len(blocks[-1])
            self._rest = self._rest[len(blocks[-1]) :]
            if not len(self._rest):
                self._rest = next(self._blocks, None)
        return np.concatenate(blocks) if blocks else np.empty((0, self.channels), dtype=np.float32)

    def _decoded(self) -> Iterator[npt.NDArray[np.float32]]:
        resampler = av.AudioResampler(format="flt")  # to float32, without resampling
        try:
            for number, packet in enumerate(self._container.demux(self._stream)):
                if number == _MAX_PACKETS:
                    raise SoundError(f"data has more than {_MAX_PACKETS} packets")
                for frame in packet.decode():
                    if self.samplerate not in (0, frame.sample_rate):
                        raise SoundError("data has several sample rates; send a file with one")
                    self.samplerate = frame.sample_rate
                    yield from self._samples(resampler, frame)
        except (av.FFmpegError, ValueError):
            raise broken(self._num_read / max(self.samplerate, 1)) from None

    def _samples(self, resampler: Any, frame: Any) -> Iterator[npt.NDArray[np.float32]]:
        for plain in resampler.resample(frame):
            block = plain.to_ndarray().reshape(-1, plain.layout.nb_channels)
            self._num_read += len(block)
            yield block
