"""Images in prompts become the tokens that the model's processor writes, and items for their parts."""

from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from image_files import image_file, rotated

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.images.head import MAX_BYTES
from pagewire_common.images.layout import BESIDE, ImageLayout, ImageLayouts
from pagewire_common.images.layout import ImagePart as Tokens
from scheduler_service.core import ImagePart
from scheduler_service.frontend.calls.generation import check_request
from scheduler_service.frontend.checking.prompt_builder import expand_images
from scheduler_service.frontend.images.checker import ImageChecker
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request_memory import request_bytes

IMAGE, PLACEHOLDER, BEGIN, BREAK = 5, 6, 7, 8
TILES = ImageLayout((BEGIN, IMAGE, IMAGE, BREAK, IMAGE, IMAGE, BEGIN), (Tokens(1, 3), Tokens(4, 6)))
DATA = image_file(20, 10)


def layout(width: int, height: int) -> ImageLayout:
    """Tall images are refused, wide ones have two parts, and squares one of a token a pixel of their side."""
    if height > width:
        raise ValueError(f"has {width} x {height} pixels; it must not be tall")
    return TILES if width > height else ImageLayout((IMAGE,) * width, (Tokens(0, width),))


@pytest.fixture(scope="module")
def checker() -> ImageChecker:
    return ImageChecker()


@pytest.fixture
def model(byte_model: ServedModel, checker: ImageChecker) -> ServedModel:
    images = ImageLayouts("tiles", IMAGE, PLACEHOLDER, layout)
    return replace(byte_model, images=images, encoder_cache_size=30, image_checker=checker)


def request(*parts: str | list[int] | bytes, **fields: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    for part in parts:
        match part:
            case str():
                message.parts.parts.add(text=part)
            case bytes():
                message.parts.parts.add(image=pb.Image(data=part))
            case _:
                message.parts.parts.add(token_ids=pb.TokenIds(ids=part))
    return message


async def test_parts_of_an_image_are_items_with_the_digest_of_the_file(model: ServedModel) -> None:
    checked = await check_request(request([70], DATA, [71], image_file(3, 3), DATA), "a", model)
    assert list(checked.prompt_token_ids) == [70, *TILES.token_ids, 71, IMAGE, IMAGE, IMAGE, *TILES.token_ids]
    assert [(item.start, item.stop, item.image) for item in checked.items] == [
        (2, 4, ImagePart(20, 10, 0)),
        (5, 7, ImagePart(20, 10, 1)),
        (9, 12, ImagePart(3, 3, 0)),
        (13, 15, ImagePart(20, 10, 0)),
        (16, 18, ImagePart(20, 10, 1)),
    ]
    digests = [item.digest for item in checked.items]
    assert digests[0] == digests[1] == digests[3] == digests[4] != digests[2]
    assert {item.data for item in checked.items} == {DATA, image_file(3, 3)}


async def test_placeholders_of_a_chat_are_replaced_in_order(model: ServedModel) -> None:
    built = await expand_images(
        [70, PLACEHOLDER, PLACEHOLDER, 71], [("images[0]", image_file(3, 3)), ("images[1]", DATA)], model
    )
    assert list(built.token_ids) == [70, IMAGE, IMAGE, IMAGE, *TILES.token_ids, 71]
    assert [(item.start, item.num_embeddings) for item in built.items] == [(1, 3), (5, 2), (8, 2)]
    assert list((await expand_images([70, 71], [], model)).token_ids) == [70, 71]
    for number in (0, 1, 3):
        with pytest.raises(RequestError, match=f"chat has 2 images, and {number} placeholders of images"):
            await expand_images([70, *[PLACEHOLDER] * number], [("a", DATA), ("b", DATA)], model)


async def test_an_image_beside_others_may_have_other_tokens(model: ServedModel) -> None:
    """Its part has another number, so that it is not taken for the image alone."""
    few = ImageLayout((IMAGE,), (Tokens(0, 1),), first_part=BESIDE)
    assert model.images is not None
    model = replace(model, images=replace(model.images, beside=lambda *_: few))
    alone = await check_request(request([70], DATA), "a", model)
    assert list(alone.prompt_token_ids) == [70, *TILES.token_ids]
    both = await check_request(request([70], DATA, [71], DATA), "a", model)
    chat = await expand_images([70, PLACEHOLDER, 71, PLACEHOLDER], [("a", DATA), ("b", DATA)], model)
    assert list(both.prompt_token_ids) == list(chat.token_ids) == [70, IMAGE, 71, IMAGE]
    assert {item.part for item in (*both.items, *chat.items)} == {BESIDE}


async def test_newlines_around_an_image_are_joined_with_those_of_a_chat(model: ServedModel) -> None:
    """There are tokens of up to four newlines; more are two tokens."""
    newlines = [[], *([10 * number] for number in range(1, 5)), [40, 10]]
    square = ImageLayout((20, IMAGE, IMAGE, 20), (Tokens(1, 3),))
    assert model.images is not None
    model = replace(model, images=replace(model.images, newlines=newlines, of=lambda *_: square))
    tokens = [10, PLACEHOLDER, 30, PLACEHOLDER, PLACEHOLDER, 10, 10, 70]
    built = await expand_images(tokens, [(name, DATA) for name in "abc"], model)
    # Seven newlines are more than the longest run that is known.
    assert list(built.token_ids) == [30, IMAGE, IMAGE, 40, 10, 20, IMAGE, IMAGE, 40, IMAGE, IMAGE, 40, 70]
    assert [item.start for item in built.items] == [1, 6, 9]


async def refusal(model: ServedModel, message: pb.GenerateRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await check_request(message, "a", model)
    return caught.value


Change = Callable[[ServedModel], ServedModel]
REFUSED: dict[str, tuple[pb.GenerateRequest, Change, str]] = {
    "1,000 images": (request(*[DATA] * 1000), lambda model: model, "parts has 1000 entries; at most 256 are allowed"),
    "no file": (request("a", b""), lambda model: model, "parts[1].image is empty"),
    "a damaged file": (request(DATA[:-30]), lambda model: model, "parts[0].image is damaged or cut off"),
    "a shape": (
        request("a", rotated(6)),
        lambda model: model,
        "parts[1].image has 10 x 20 pixels; it must not be tall",
    ),
    "the context": (
        request(*[DATA] * 15),
        lambda model: model,
        "parts has 105 tokens; the context has 100",
    ),
    "a part": (
        request(DATA, image_file(31, 31)),
        lambda model: model,
        "parts[1].image has a part of 31 tokens; the workers read at most 30 (--encoder-cache-size, ",
    ),
    "log-probabilities": (
        request(DATA, sampling=pb.SamplingParams(prompt_logprobs=1)),
        lambda model: model,
        "sampling.prompt_logprobs is not possible with parts",
    ),
    "a token outside": (
        request(DATA),
        lambda model: replace(model, vocabulary_size=8),
        "parts[0].image contains 8; the vocabulary has 8 tokens",
    ),
    "no images": (
        request(DATA),
        lambda model: replace(model, images=None),
        "parts[0].image: this model reads no images",
    ),
    "a reason": (
        request(DATA),
        lambda model: replace(model, images=None, images_refusal="preprocessor_config.json is missing"),
        "this model reads no images: preprocessor_config.json is missing",
    ),
    "no encoder": (
        request(DATA),
        lambda model: replace(model, encoder_cache_size=0),
        "this model reads no images: its workers encode no images",
    ),
}


@pytest.mark.parametrize(("message", "change", "reason"), REFUSED.values(), ids=REFUSED)
async def test_what_is_wrong_with_an_image_is_said(
    message: pb.GenerateRequest, change: Change, reason: str, model: ServedModel
) -> None:
    error = await refusal(change(model), message)
    assert reason in str(error)
    code = grpc.StatusCode.UNIMPLEMENTED if "reads no images" in reason else grpc.StatusCode.INVALID_ARGUMENT
    assert error.code is code


async def test_images_of_a_request_have_limits_together(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BYTES == 16 << 20
    place = "scheduler_service.frontend.checking.prompt_builder."
    for name, most, reason in (
        ("MAX_BYTES", 2 * len(DATA), f"the images up to parts[2].image have {3 * len(DATA)} bytes"),
        ("MAX_IMAGES", 2, "parts[2].image is one image too many; at most 2 are allowed"),
        ("MAX_PIXELS_TOGETHER", 400, "the images up to parts[2].image have 600 pixels; at most 400 are allowed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place + name, most)
            assert len((await check_request(request(DATA, DATA), "a", model)).items) == 4
            assert reason in str(await refusal(model, request(DATA, DATA, DATA)))


def test_the_bytes_of_images_count_as_those_of_a_request() -> None:
    chat = pb.GenerateRequest()
    chat.chat.messages.add(role="user").parts.add(image=pb.Image(data=DATA))
    for message in (request(DATA), chat):
        assert request_bytes(message) - request_bytes(pb.GenerateRequest()) >= 5 * len(DATA)
