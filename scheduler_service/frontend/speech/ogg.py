"""Whether an Ogg file has all of its pages: libsndfile skips damaged or lost pages, and joins the rest.

Each page has the number of its stream, its own number within it, and a checksum (RFC 3533).
"""

import struct
import zlib

_MARK = b"OggS"
_HEAD = struct.Struct("<5xB8xII4sx")
"""Header of a page: flags, stream, page number, checksum. Its last byte is the number of lengths that follow."""
_FIRST_PAGE = 2
"""The flag of a stream's first page."""
_CHECKSUM = slice(22, 26)
_MAX_PAGES = 1 << 18
"""Pages of a file, at most: an hour has 180,000 of 20 ms. Python takes 3 µs a page (AMD EPYC), and 16 MB may have
600,000.
"""
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
"""Bytes with reversed bits, for which Ogg's checksum equals zlib's."""


def flaw(data: bytes) -> str | None:
    """Why a file would not be decoded in full, as the end of a sentence about it; None if it would.

    Bytes outside pages, such as a title after the last page, are skipped, as in libsndfile. The last page need not have
    the end flag: recorders of voice messages and of live streams omit it. So a file that was cut off between two pages
    has no flaw.
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
    """The end of the page that begins at `at`; beyond the data if the page is incomplete."""
    lengths = at + _HEAD.size
    if lengths > len(data):
        return lengths
    body = lengths + data[lengths - 1]
    return body + sum(data[lengths:body])


def _checksum(page: bytes) -> bytes:
    """CRC of a page with zeros in place of its checksum. Ogg starts with 0 and inverts nothing; zlib inverts both."""
    mirrored = (page[: _CHECKSUM.start] + bytes(4) + page[_CHECKSUM.stop :]).translate(_MIRRORED)
    return (zlib.crc32(mirrored, 0xFFFF_FFFF) ^ 0xFFFF_FFFF).to_bytes(4, "big").translate(_MIRRORED)
