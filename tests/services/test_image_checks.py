"""Images of requests are refused in a sentence before they take memory, and decoded once."""

import asyncio
import random

import grpc
import pytest
from image_files import animated_gif, image_file, png, rotated

from pagewire_common.calls.errors import RequestError
from pagewire_common.images.decoding import decode_image
from pagewire_common.images.head import FORMATS, MAX_BYTES, MAX_PIXELS, read_head
from scheduler_service.frontend.images import checker as checker_module
from scheduler_service.frontend.images.checker import CheckedImage, ImageChecker
from scheduler_service.frontend.limited.limited_process import LimitedProcess, Limits


@pytest.fixture(scope="module")
def checker() -> ImageChecker:
    return ImageChecker()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of each image that a process decodes."""
    asked, ask = [], LimitedProcess.ask

    def noting(process: LimitedProcess, message: bytes, limits: Limits) -> bytes:
        asked.append(len(message))
        return ask(process, message, limits)

    monkeypatch.setattr(LimitedProcess, "ask", noting)
    return asked


READ = {
    **{kind: (image_file(kind=kind), (20, 10)) for kind in FORMATS},
    "progressive JPEG": (image_file(kind="JPEG", progressive=True), (20, 10)),
    "CMYK": (image_file(kind="JPEG", mode="CMYK"), (20, 10)),
    "16 bits": (image_file(mode="I;16"), (20, 10)),
    "palette": (image_file(mode="P"), (20, 10)),
    "palette with transparency": (image_file(mode="P", transparency=3), (20, 10)),
    "alpha": (image_file(mode="RGBA"), (20, 10)),
    "grey with alpha": (image_file(mode="LA"), (20, 10)),
    "one bit": (image_file(mode="1"), (20, 10)),
    "lossless WebP with alpha": (image_file(kind="WebP", mode="RGBA", lossless=True), (20, 10)),
    "upright": (rotated(3), (20, 10)),
    "on its side": (rotated(6), (10, 20)),
    "a PNG on its side": (rotated(8, "PNG"), (10, 20)),
    "a WebP on its side": (rotated(5, "WebP"), (10, 20)),
    "100,000 frames": (animated_gif(100_000), (20, 10)),
    "a strip": (png(1, 60_000, [b"\0\0"] * 60_000), (1, 60_000)),
}


@pytest.mark.parametrize(("data", "size"), READ.values(), ids=READ)
async def test_what_workers_decode_is_read_with_its_upright_size(
    data: bytes, size: tuple[int, int], checker: ImageChecker
) -> None:
    checked = await checker.check("image", data)
    assert (checked.width, checked.height) == size == decode_image(data).size
    assert len(checked.digest) == 32


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


TEN_GB = png(100_000, 100_000, [])
REFUSED = {
    "nothing": (b"", "parts[1].image is empty"),
    "a text called .png": (b"not an image", "is not an image of a known format; it must be PNG, JPEG, WebP or GIF"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image of a known format"),
    "10 GB": (TEN_GB, f"has 100000 x 100000 pixels; at most {MAX_PIXELS} are allowed"),
    "a strip": (png(32 << 20, 1, []), "has 33554432 x 1 pixels; a side may have at most 65535"),
    "no pixels": (png(0, 10, []), "has 0 x 10 pixels"),
    "many bytes": (image_file() + bytes(MAX_BYTES), f"bytes; at most {MAX_BYTES} are allowed"),
    "a large GIF": (b"GIF89a" + b"\xff" * 20, "has 65535 x 65535 pixels"),
    "a JPEG of 4 million comments": (
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * (MAX_BYTES // 4 - 1),
        "begins as JPEG, and has no size",
    ),
    "a JPEG of filling bytes": (b"\xff\xd8" + b"\xff" * (MAX_BYTES - 2), "begins as JPEG, and has no size"),
    "no rows": (png(20, 10, []), "is damaged or cut off: it begins as PNG, and cannot be decoded"),
    **{
        f"half a {kind}": (half(image_file(200, 100, kind)), f"is damaged or cut off: it begins as {kind}")
        for kind in FORMATS
    },
    **{f"the beginning of a {kind}": (image_file(kind=kind)[:14], "is damaged or cut off") for kind in FORMATS},
    "a GIF larger than its header": (
        image_file(20, 10, "GIF", "P").replace(b"\x14\x00\x0a\x00", b"\x01\x00\x01\x00", 1),
        "pixels, and its first bytes say 1 x 1",
    ),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_read_is_refused_by_name(data: bytes, reason: str, checker: ImageChecker) -> None:
    with pytest.raises(RequestError) as caught:
        await checker.check("parts[1].image", data)
    assert str(caught.value).startswith("parts[1].image ")
    assert reason in str(caught.value)


async def test_what_its_first_bytes_refuse_reaches_no_decoder(checker: ImageChecker, asked: list[int]) -> None:
    for data in (b"", b"not an image", TEN_GB, image_file() + bytes(MAX_BYTES)):
        with pytest.raises(RequestError):
            await checker.check("image", data)
    assert not asked


async def test_the_same_image_in_1000_requests_is_decoded_once(asked: list[int]) -> None:
    checker, good, bad = ImageChecker(), image_file(30, 30), half(image_file(30, 30))
    found = await asyncio.gather(*(checker.check("image", good) for _ in range(1000)))
    assert {*found} == {CheckedImage(found[0].digest, 30, 30)}
    for _ in range(3):
        with pytest.raises(RequestError, match="is damaged or cut off"):
            await checker.check("image", bad)
    assert asked == [len(good), len(bad)]


async def test_an_image_that_takes_too_much_is_refused_and_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = ImageChecker()
    large = png(4000, 4000, (b"\0" + bytes(4000) for _ in range(4000)))
    with monkeypatch.context() as patch:
        patch.setattr(checker_module, "MEMORY_OF_PIXEL", 0)
        with pytest.raises(RequestError, match="image cannot be decoded: it takes more than 64 MiB of memory"):
            await checker.check("image", large)
    with monkeypatch.context() as patch:
        patch.setattr(checker_module, "SECONDS", 0.01)
        patch.setattr(checker_module, "SECONDS_OF_PIXEL", 0)
        with pytest.raises(RequestError, match=r"image cannot be decoded: it takes more than 0\.01 s of CPU time"):
            await checker.check("image", large[:-4] + b"late")
    # The same files, when the machine is less busy.
    assert (await checker.check("image", large)).width == 4000
    assert (await checker.check("image", image_file())).width == 20


async def test_only_the_last_images_are_remembered(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    monkeypatch.setattr(checker_module, "MAX_KEPT", 2)
    checker, images = ImageChecker(), [image_file(side, side) for side in (5, 6, 7)]
    for image in (images[0], images[1], images[0], images[2], images[0], images[1]):
        await checker.check("image", image)
    assert asked == [len(images[number]) for number in (0, 1, 2, 1)]


def test_any_bytes_after_the_first_ones_are_read_or_refused() -> None:
    for kind in FORMATS:
        data = image_file(kind=kind)
        for length in range(len(data)):
            try:
                read_head(data[:length])
            except ValueError as error:
                assert str(error).startswith(("is ", "has "))  # noqa: PT017


async def test_a_file_with_any_damage_is_read_or_refused(checker: ImageChecker) -> None:
    numbers = random.Random(1)
    for kind in FORMATS:
        data = image_file(kind=kind)
        for _ in range(30):
            damaged = bytearray(data)
            for _ in range(numbers.randint(1, 4)):
                damaged[numbers.randrange(len(data))] = numbers.randrange(256)
            try:
                checked = await checker.check("image", bytes(damaged))
            except RequestError as error:
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017
            else:
                assert checked.width * checked.height <= MAX_PIXELS
