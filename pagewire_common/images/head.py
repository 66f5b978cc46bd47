"""Reads format and size from the first bytes of an image file, before any memory is taken for its pixels."""

from typing import Literal, NamedTuple

MAX_BYTES = 16 << 20
"""Bytes of all images of a request."""
MAX_IMAGES = 256
"""Images of a request."""
MAX_PIXELS = 32 << 20
"""Pixels of an image. Decoded, a pixel takes 4 bytes."""
MAX_SIDE = 0xFFFF
"""Pixels of a side, the most in JPEG and GIF. A PNG of 32 Mi x 1 pixels took an image processor 11 s and 2 GB; of
65,535 x 512 pixels, it took 1 s and 320 MB."""
MAX_PIXELS_TOGETHER = 256 << 20
"""Pixels of all images of a request, which take about 10 s of CPU time to decode."""
FORMATS = ("PNG", "JPEG", "WebP", "GIF")
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of segments that contain the size."""
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
_MAX_SEGMENTS = 1024
"""Segments and filling bytes of a JPEG before its size, at 0.3 µs each. A file with large EXIF data and colour profile
has 300."""


class ImageHead(NamedTuple):
    """`format`: one of `FORMATS`. `width`, `height`: pixels, before the rotation that EXIF data may state."""

    format: str
    width: int
    height: int


def read_head(data: bytes) -> ImageHead:
    """Raises ValueError with the rest of a sentence that begins with the image's name."""
    if not data:
        raise ValueError("is empty")
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        kind, size = "PNG", _numbers(data, 16, 4, "big") if data[12:16] == b"IHDR" else None
    elif data.startswith((b"GIF87a", b"GIF89a")):
        kind, size = "GIF", _numbers(data, 6, 2, "little")
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        kind, size = "WebP", _webp_size(data)
    elif data.startswith(b"\xff\xd8\xff"):
        kind, size = "JPEG", _jpeg_size(data)
    else:
        raise ValueError(f"is not an image of a known format; it must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if size is None:
        raise ValueError(f"is damaged or cut off: it begins as {kind}, and has no size")
    width, height = size
    if not width or not height:
        raise ValueError(f"has {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise ValueError(f"has {width} x {height} pixels; at most {MAX_PIXELS} are allowed")
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"has {width} x {height} pixels; a side may have at most {MAX_SIDE}")
    return ImageHead(kind, width, height)


def _numbers(data: bytes, start: int, length: int, order: Literal["big", "little"]) -> tuple[int, int] | None:
    if len(data) < start + 2 * length:
        return None
    first, second = data[start : start + length], data[start + length : start + 2 * length]
    return int.from_bytes(first, order), int.from_bytes(second, order)


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """The size of the whole image, from the first chunk."""
    kind = data[12:16]
    if kind == b"VP8X" and (size := _numbers(data, 24, 3, "little")):
        return size[0] + 1, size[1] + 1
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a" and (size := _numbers(data, 26, 2, "little")):
        return size[0] & 0x3FFF, size[1] & 0x3FFF  # the upper bits ask for scaling, which decoders ignore
    if kind == b"VP8L" and len(data) >= 25 and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """The size in the first frame segment, which may follow others, such as EXIF data."""
    place = 2
    for _ in range(_MAX_SEGMENTS):
        if place + 9 > len(data) or data[place] != 0xFF:
            break
        marker = data[place + 1]
        if marker == 0xFF:  # a filling byte
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        elif marker in _FRAMES:
            height, width = int.from_bytes(data[place + 5 : place + 7]), int.from_bytes(data[place + 7 : place + 9])
            return width, height
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4])
    return None
