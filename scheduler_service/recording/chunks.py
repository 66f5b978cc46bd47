"""The frames of a recording, compressed in chunks that begin with a key frame, in memory or a temporary file."""

import gzip
import json
import tempfile
from bisect import bisect_right
from types import TracebackType
from typing import Any, NamedTuple, Self

STEPS = 256
CHUNK_BYTES = 1 << 20
"""A chunk ends after STEPS frames, or when its JSON has CHUNK_BYTES, because a browser applies it at once. If the key
frame is large, the chunk has twice its bytes: else each step of a large pool would be a key frame."""
MEMORY_BYTES = 64 << 20
"""Bytes of compressed chunks above which they are kept in a temporary file."""


class _Place(NamedTuple):
    step: int
    offset: int
    num_bytes: int


class Chunks:
    """Add all frames, then `finish`. Each chunk is gzip of `{"from": STEP, "frames": [...]}`."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(memory_bytes)  # noqa: SIM115  # `__exit__` closes it
        self._places: list[_Place] = []
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._first = 0

    @property
    def wants_key_frame(self) -> bool:
        """Whether the next frame must be a snapshot."""
        if not self._frames or len(self._frames) >= STEPS:
            return True
        return self._num_bytes >= max(CHUNK_BYTES, 2 * len(self._frames[0]))

    @property
    def num_chunks(self) -> int:
        return len(self._places)

    def add(self, step: int, frame: dict[str, Any]) -> None:
        if frame.get("snapshot"):
            self.finish()
            self._first = step
        data = json.dumps(frame, separators=(",", ":")).encode()
        self._frames.append(data)
        self._num_bytes += len(data)

    def finish(self) -> None:
        """End the last chunk."""
        if self._frames:
            data = gzip.compress(b'{"from":%d,"frames":[%b]}' % (self._first, b",".join(self._frames)), 5, mtime=0)
            offset = self._file.seek(0, 2)
            self._file.write(data)
            self._places.append(_Place(self._first, offset, len(data)))
            self._frames, self._num_bytes = [], 0

    def read(self, step: int) -> bytes:
        """The chunk with this step; the first or last one for a step outside. Raises LookupError without frames."""
        if not self._places:
            raise LookupError("the recording has no steps")
        index = bisect_right(self._places, step, key=lambda place: place.step) - 1
        place = self._places[max(0, index)]
        self._file.seek(place.offset)
        return self._file.read(place.num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
