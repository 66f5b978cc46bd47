"""The process that decodes images, to find out whether a worker can."""

import struct

from pagewire_common.images.decoding import decode_image
from scheduler_service.frontend.limited.limited_work import connect_to_the_front_end, serve

MAX_KEPT = 64 << 20
"""Bytes of resident memory of the process, which starts with 19 MiB. It exits after an image with which it exceeds
`MAX_KEPT`."""
SIZE = struct.Struct("=II")
"""Width and height in an answer. Any other answer is an error message, which begins with a zero byte."""


def answer(data: bytes) -> bytes:
    """The size of the decoded image, or the rest of a sentence about it."""
    try:
        image = decode_image(data)
    except ValueError as error:
        return b"\0" + str(error).encode()
    return b"\1" + SIZE.pack(image.width, image.height)


def main() -> None:
    serve(connect_to_the_front_end(), answer, MAX_KEPT)


if __name__ == "__main__":
    main()
