"""Reads a sound file window by window and converts it to the model's input: one channel, 16,000 samples a second.

A small file may claim or contain hours of sound, so the header is checked before any decoding, and only the current
window is decoded.
"""

import io
import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from scheduler_service.frontend.speech import ogg
from scheduler_service.frontend.speech.sound_error import HEARD, SoundError, broken, unreadable

if TYPE_CHECKING:
    from scheduler_service.frontend.speech.container import Container

SAMPLE_RATE = 16_000
FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "RF64": "WAV", "FLAC": "FLAC", "MPEG": "MP3", "MP3": "MP3", "OGG": "OGG"}
"""Supported formats, by libsndfile's names."""
MAX_CHANNELS = 8
SAMPLE_RATES = (4_000, 192_000)
_UNKNOWN_LENGTH = 0x7FFF_0000
"""A data length in a WAV header counts as unknown from this value on: some recorders write it before the sound."""
_UNKNOWN_FRAMES = 1 << 50
"""A frame count from this value on is unknown, as libsndfile's for FLAC or MP3 without a length."""
_ENDLESS_BYTES = 1 << 56
"""The MP3 size reported to libsndfile: its lowest estimate of the length (384 samples for 1,728 bytes) counts as
unknown, its highest fits into 63 bits.
"""
_MAX_LOST = 0.9
"""Share of the header's frames that a file must contain."""
_CUT_OFF = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)
_CUT_OFF_LONG = re.compile(r"frame count (\d+) does not match value from 'ds64' chunk of (\d+)")
"""libsndfile's message about an RF64 file whose data chunk states no length."""

_TAG = re.compile(rb"ID3...(....)", re.DOTALL)
"""The header of an ID3 tag before a sound, with the length of the rest of the tag: four bytes of seven bits."""
_MAX_TAGS = 16
"""Largest number of ID3 tags before a sound. 800,000 tags in 16 MB took libsndfile 25 s."""
_MAX_NUMBERS = 1 << 19
"""Samples, of all channels together, that are decoded at a time, in three buffers of 2 MB."""

Samples = npt.NDArray[np.float32]


class _Forwards(soundfile.SoundFile):  # type: ignore[misc]  # the library soundfile has no types
    """A file for libsndfile that is not seekable: soundfile would seek after every read, and fail at the end of a FLAC
    file without a length.
    """

    def seekable(self) -> bool:
        return False

    @property
    def frames(self) -> int | None:
        """Samples of each channel according to the header; None if it states no length."""
        return None if super().frames >= _UNKNOWN_FRAMES else int(super().frames)

    def read(self, length: int) -> Samples:
        """The next `length` samples, or the remaining ones: [num_samples, num_channels]."""
        return super().read(length, dtype="float32", always_2d=True)  # type: ignore[no-any-return]


class _Endless(io.BytesIO):
    """An MP3 file that reports a much larger size than its real size.

    Without a length in the header, libsndfile estimates it from the size and the first frame's bitrate, and reads no
    further: less than half of an MP3 of varying bitrate.
    """

    _is_at_end = False

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._is_at_end = whence == io.SEEK_END
        super().seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return _ENDLESS_BYTES if self._is_at_end else super().tell()


class Sound:
    """An opened sound file. Read it on a thread, because reading takes milliseconds, and on one thread at a time."""

    def __init__(self, data: bytes, max_seconds: float) -> None:
        """Open a file and check its header. Raises SoundError."""
        self._max_seconds = max_seconds
        if not data:
            raise SoundError("data is empty; a sound file is needed")
        self._file = file = _open(data)
        if not 1 <= file.channels <= MAX_CHANNELS:
            raise SoundError(f"data has {file.channels} channels; at most {MAX_CHANNELS} are allowed")
        low, high = SAMPLE_RATES
        if not low <= file.samplerate <= high:
            raise SoundError(f"data has {file.samplerate} samples a second; {low} to {high} are allowed")
        if file.frames is not None:
            self._check_seconds(file.frames / file.samplerate)
        self._resampler = soxr.ResampleStream(file.samplerate, SAMPLE_RATE, 1, dtype="float32")
        # A block lasts one second in most sounds. `_num_read`: samples at the file's rate. `_start`: position of the
        # first sample of `_kept`, at the model's rate.
        self._block = min(file.samplerate, _MAX_NUMBERS // file.channels)
        self._num_read = 0
        self._start = 0
        self._kept: Samples = np.empty(0, dtype=np.float32)
        self._is_over = False

    @property
    def stated_seconds(self) -> float:
        """The length that the header states, or 0."""
        return (self._file.frames or 0) / float(self._file.samplerate)

    @property
    def seconds(self) -> float:
        """Seconds of sound read so far; after the last window, the full length."""
        return self._num_read / float(self._file.samplerate)

    def window(self, start: int, length: int) -> Samples:
        """The `length` samples from position `start` on, or fewer at the end of the file.

        Windows may overlap, but not start before the previous one. Raises SoundError.
        """
        assert start >= self._start
        while len(self._kept) < start + length - self._start and not self._is_over:
            self._read()
            self._drop(min(start, self._start + len(self._kept)))
        self._drop(min(start, self._start + len(self._kept)))
        return self._kept[:length]

    def _drop(self, start: int) -> None:
        self._kept, self._start = self._kept[start - self._start :], start

    def _read(self) -> None:
        try:
            block = self._file.read(self._block)
        except soundfile.LibsndfileError as error:
            raise broken(self.seconds) from error
        self._num_read += len(block)
        self._check_seconds(self.seconds)
        self._is_over = len(block) < self._block
        frames = self._file.frames
        if self._is_over and frames is not None and self._num_read < _MAX_LOST * frames:
            said = frames / self._file.samplerate
            raise SoundError(f"data is cut off: its header says {said:.1f} s, and there are {self.seconds:.1f}")
        # Float samples outside [-1, 1] are clipped, and NaN becomes silence.
        mono = np.ascontiguousarray(np.clip(np.nan_to_num(block), -1.0, 1.0).mean(axis=1))
        self._kept = np.concatenate((self._kept, self._resampler.resample_chunk(mono, last=self._is_over)))

    def _check_seconds(self, seconds: float) -> None:
        if seconds > self._max_seconds:
            raise SoundError(f"data is a sound of {seconds:.0f} s or more; at most {self._max_seconds:g} s are allowed")


def _demuxer(data: bytes) -> str | None:
    """FFmpeg's demuxer for a file, by its first bytes; None if it is neither MP4 nor WebM."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data.startswith(b"\x1a\x45\xdf\xa3") else None


def _open(data: bytes) -> "_Forwards | Container":
    if (demuxer := _demuxer(data)) is not None:
        # FFmpeg's libraries take 17 MiB of memory and 0.1 s to load.
        from scheduler_service.frontend.speech.container import Container

        return Container(data, demuxer)
    _check_tags(data)
    try:
        file = _Forwards(io.BytesIO(data))
        # For a WAV file with `_Endless`, libsndfile would search for the end of the header forever.
        if FORMATS.get(file.format) == "MP3":
            file = _Forwards(_Endless(data))
    except soundfile.LibsndfileError as error:
        raise unreadable() from error
    if (kind := FORMATS.get(file.format)) is None:
        raise SoundError(f"data is {file.format}; {HEARD}")
    _check_whole(data, kind, file.extra_info)
    return file


def _check_tags(data: bytes) -> None:
    at = 0
    for _ in range(_MAX_TAGS + 1):
        if (tag := _TAG.match(data, at)) is None:
            return
        at = tag.end() + sum((part & 0x7F) << shift for part, shift in zip(tag[1], (21, 14, 7, 0), strict=True))
    raise SoundError(f"data begins with more than {_MAX_TAGS} ID3 tags")


def _check_whole(data: bytes, kind: str, log: str) -> None:
    """Raises SoundError if libsndfile (messages: `log`) would decode only a part of a file, or if it is damaged."""
    if kind == "OGG" and (flaw := ogg.flaw(data)) is not None:
        raise SoundError(f"data {flaw}")
    if (cut := _CUT_OFF.search(log)) and int(cut[1]) < _UNKNOWN_LENGTH:
        raise SoundError(f"data is cut off: its header says {cut[1]} bytes of samples, and there are {cut[2]}")
    if (cut := _CUT_OFF_LONG.search(log)) and int(cut[1]) < int(cut[2]) < _UNKNOWN_FRAMES:
        raise SoundError(f"data is cut off: its header says {cut[2]} samples, and there are {cut[1]}")
