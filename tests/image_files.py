"""Image files, ordinary and hostile."""

import struct
import zlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any

from PIL import Image


def image_file(width: int = 20, height: int = 10, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """An image with a gradient, so that its orientation is visible."""
    image = Image.linear_gradient("L").resize((width, height)).convert(mode)
    return saved(image, kind, **options)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated(orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image_file(20, 10, kind, exif=exif)


def png(width: int, height: int, rows: Iterable[bytes], *, depth: int = 8, color: int = 0) -> bytes:
    """A PNG with the given size in its header, whatever its rows have."""
    packer = zlib.compressobj(9)
    packed = b"".join([*(packer.compress(row) for row in rows), packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def animated_gif(num_frames: int) -> bytes:
    """A GIF whose first frame is read, and whose others are tiny blocks."""
    first = image_file(20, 10, "GIF", "P")
    end = first.rindex(b";")
    frame = b"\x21\xf9\x04\x04\x01\x00\x00\x00\x2c\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02\x44\x01\x00"
    return first[:end] + frame * num_frames + b";"
