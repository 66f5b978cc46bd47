"""Checks that an Ogg file has all of its pages: libsndfile skips damaged or lost pages, and joins the other pages.

The header of an Ogg page contains the number of its stream, the page's number within the stream, and a checksum (RFC
3533).
"""

import struct
import zlib

_MARK = b"OggS"
_HEAD = struct.Struct("<5xB8xII4sx")
"""Header of an Ogg page: flags, stream, page number, checksum. The header's last byte is the number of segment lengths
that follow the header.
"""
_FIRST_PAGE = 2
"""The flag of the first page of a stream."""
_CHECKSUM = slice(22, 26)
_MAX_PAGES = 1 << 18
"""Largest number of pages of an Ogg file. An hour of sound has 180,000 pages of 20 ms. A malicious file of 16 MB may
have 600,000 pages, of which Python checks one in 3 µs (AMD EPYC).
"""
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
"""All byte values with reversed bits. For bytes with reversed bits, zlib's CRC computes Ogg's checksum."""


def flaw(data: bytes) -> str | None:
    """Why libsndfile would skip a part of an Ogg file, as the end of an error sentence; None for an intact file.

    Bytes outside pages, such as a title after the last page, are skipped, as in libsndfile. The last page may lack the
    flag that marks the end of a stream, because recorders of voice messages and of live streams omit this flag. Without
    this flag, a file that was cut off between two pages cannot be told from an intact file, and counts as intact.
    """
    expected: tuple[int, int] | None = None
    end = 0
    for _ in range(_MAX_PAGES):
        if (at := data.find(_MARK, end)) < 0:
            return None
        if (end := _end(data, at)) > len(data):
            return "is cut off: its last page is not whole"
        flags, stream, number, checksum = _HEAD.unpack_from(data, at)
        if _checksum(data[at:end]) != checksum:
            return f"is damaged in page {number}"
        if expected is not None and flags & _FIRST_PAGE:
            return "has several streams, of which one would be heard; send one with a single stream"
        if expected is not None and expected != (stream, number):
            return f"is damaged: page {expected[1]} is missing"
        expected = stream, number + 1
    return f"has {_MAX_PAGES} pages or more"


def _end(data: bytes, at: int) -> int:
    """The position of the end of the page that begins at `at`.

    For an incomplete page, this position is beyond the data.
    """
    lengths = at + _HEAD.size
    if lengths > len(data):
        return lengths
    body = lengths + data[lengths - 1]
    return body + sum(data[lengths:body])


def _checksum(page: bytes) -> bytes:
    """The CRC of a page whose checksum field is set to zero.

    Unlike zlib's CRC, Ogg's CRC inverts neither its start value nor its result.
    """
    mirrored = (page[: _CHECKSUM.start] + bytes(4) + page[_CHECKSUM.stop :]).translate(_MIRRORED)
    return (zlib.crc32(mirrored, 0xFFFF_FFFF) ^ 0xFFFF_FFFF).to_bytes(4, "big").translate(_MIRRORED)
