"""A session mirrors the encoder cache, and refuses steps that read or keep more than it holds."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from worker_helpers import LIMITS, new_sequence

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from worker_service.errors import InvalidStepError
from worker_service.serving.codec.items import decode_items
from worker_service.session import items
from worker_service.session.items import EncoderItem, PromptItem
from worker_service.session.session import Session
from worker_service.session.step import NewSequence, SchedulerOutput

IMAGE = 99
DIGEST, OTHER = b"a" * 32, b"b" * 32


def layout(width: int, height: int) -> ImageLayout:
    """Two parts, of `width` image tokens each, with a token between them."""
    if height > width:
        raise ValueError("it is too high")
    tokens = (1, *(IMAGE,) * width, 2, *(IMAGE,) * width)
    return ImageLayout(tokens, (ImagePart(1, 1 + width), ImagePart(2 + width, 2 + 2 * width)))


LAYOUTS = ImageLayouts("tiles", IMAGE, 5, layout)
READS = replace(LIMITS, images=LAYOUTS, encoder_cache_size=9, encoder_budget=4)
PROMPT = [7, *layout(3, 1).token_ids, 8, 9]


def item(part: int, data: bytes = b"file", digest: bytes = DIGEST) -> PromptItem:
    """A part of an image at token 1 of PROMPT."""
    start = 2 + 4 * part
    return PromptItem(digest, start, start + 3, image=items.ImagePart(part, 3, 1, None, data))


def new(sequence_id: int, parts: Sequence[PromptItem] = (item(0), item(1, b"")), num_computed: int = 0) -> NewSequence:
    return new_sequence(sequence_id, PROMPT, range(4), num_computed, items=tuple(parts))


class Steps:
    def __init__(self) -> None:
        self.session = Session(1, READS)
        self._step_id = 0

    def step(
        self, *scheduled: tuple[int, int], encode: Sequence[EncoderItem] = (), **output: object
    ) -> SchedulerOutput:
        """Compute (sequence, tokens) of each."""
        self._step_id += 1
        step = SchedulerOutput(
            1,
            self._step_id,
            sequence_ids=tuple(one for one, _ in scheduled),
            num_scheduled_tokens=tuple(count for _, count in scheduled),
            samples=(False,) * len(scheduled),
            items_to_encode=tuple(encode),
            **output,  # type: ignore[arg-type]
        )
        chunks = self.session.apply(step)
        found = self.session.with_images(step, chunks)
        self.session.advance(chunks)
        return found


def test_each_image_to_encode_or_to_prepare_comes_with_its_file() -> None:
    steps = Steps()
    ahead = (EncoderItem(OTHER, 0), EncoderItem(DIGEST, 0), EncoderItem(DIGEST, 1))
    found = steps.step((1, 4), encode=[EncoderItem(DIGEST, 0)], items_ahead=ahead, new_sequences=(new(1),))
    (image,) = found.images
    assert (image.data, image.width, image.height, image.num_tokens, image.num_embeddings) == (b"file", 3, 1, 3, 3)
    assert [image.item for image in found.images_ahead] == [EncoderItem(DIGEST, 1)]
    assert steps.step((1, 1)).images == ()  # tokens of an image that is encoded already
    found = steps.step((1, 4), encode=[EncoderItem(DIGEST, 1)])
    assert [image.item.part for image in found.images] == [1]


def test_a_chunk_may_not_read_an_image_that_is_not_encoded() -> None:
    steps = Steps()
    steps.step((1, 2), new_sequences=(new(1),))  # the tokens before the image
    with pytest.raises(InvalidStepError, match="sequence 1 computes token 2, whose image is not encoded"):
        steps.step((1, 1))
    steps = Steps()
    steps.step((1, 3), encode=[EncoderItem(DIGEST, 0)], new_sequences=(new(1),))
    with pytest.raises(InvalidStepError, match="computes token 3, whose image"):
        steps.step((1, 1), dropped_embeddings=(EncoderItem(DIGEST, 0),))


def test_computed_tokens_need_neither_the_file_nor_the_embeddings() -> None:
    steps = Steps()
    steps.step((1, 2), new_sequences=(new(1, [item(0, b""), item(1, b"")], num_computed=9),))


@pytest.mark.parametrize(
    ("encode", "reason"),
    [
        ([EncoderItem(DIGEST, 0), EncoderItem(DIGEST, 1)], "6 tokens in one step; the limit of several is 4"),
        ([EncoderItem(DIGEST, 0), EncoderItem(DIGEST, 0)], "is encoded already"),
        ([EncoderItem(OTHER, 0)], "is of no image that this session has"),
        ([EncoderItem(DIGEST, 2)], "part 2 of 6161.* is of no image"),
    ],
    ids=str,
)
def test_what_cannot_be_encoded_is_refused(encode: list[EncoderItem], reason: str) -> None:
    with pytest.raises(InvalidStepError, match=reason):
        Steps().step((1, 1), encode=encode, new_sequences=(new(1),))


def test_the_cache_has_room_again_when_embeddings_are_dropped() -> None:
    steps = Steps()
    steps.step((1, 1), encode=[EncoderItem(DIGEST, 0)], new_sequences=(new(1),))
    steps.step((1, 1), encode=[EncoderItem(DIGEST, 1)])
    others = [item(part, b"other", OTHER) for part in (0, 1)]
    steps.step((1, 1), encode=[EncoderItem(OTHER, 0)], new_sequences=(new(2, others),))
    dropped = (EncoderItem(DIGEST, 0), EncoderItem(DIGEST, 7))
    steps.step((2, 3), encode=[EncoderItem(OTHER, 1)], dropped_embeddings=dropped)
    with pytest.raises(InvalidStepError, match="the cache would have 12 tokens of 9"):
        steps.step((2, 1), encode=[EncoderItem(DIGEST, 0)])


def test_a_file_that_is_dropped_cannot_be_encoded_until_it_is_sent_again() -> None:
    steps = Steps()
    steps.step((1, 1), new_sequences=(new(1),))
    steps.step((1, 1), new_sequences=(new(2),), dropped_items=(DIGEST,), encode=[EncoderItem(DIGEST, 0)])
    with pytest.raises(InvalidStepError, match="is of no image that this session has"):
        steps.step((1, 1), dropped_items=(DIGEST,), encode=[EncoderItem(DIGEST, 1)])


def decode(*found: pb.PromptItem, limits: object = READS) -> tuple[PromptItem, ...]:
    message = pb.NewSequence(num_prompt_tokens=len(PROMPT), token_ids=PROMPT, items=found)
    return decode_items("here", message, limits)  # type: ignore[arg-type]


def message(part: int = 0, start: int = 2, number: int = 3, width: int = 3, height: int = 1) -> pb.PromptItem:
    image = pb.ImagePart(width=width, height=height, part=part)
    return pb.PromptItem(digest=DIGEST, start=start, num_embeddings=number, data=b"file", image=image)


def test_images_are_decoded() -> None:
    assert decode(message(), message(1, 6)) == (item(0), item(1))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (message(start=3), "its tokens are not those of part 0 of the image"),
        (message(number=2), "its tokens are not those of part 0"),
        (message(width=2), "its tokens are not those of part 0"),
        (message(part=2), "part 2 of an image with 2 parts"),
        (message(height=4), "an image of 3 x 4 pixels: it is too high"),
        (message(width=0), "an image of 0 x 1 pixels"),
    ],
    ids=str,
)
def test_an_image_whose_tokens_are_not_the_models_is_refused(wrong: pb.PromptItem, reason: str) -> None:
    with pytest.raises(InvalidStepError, match=reason):
        decode(wrong)


def test_images_are_refused_by_a_worker_that_reads_none() -> None:
    with pytest.raises(InvalidStepError, match="this worker reads no images"):
        decode(message(), limits=replace(LIMITS, prompt_embeds_size=8))
    session = Session(1, LIMITS)
    step = SchedulerOutput(1, 1, items_to_encode=(EncoderItem(DIGEST, 0),))
    with pytest.raises(InvalidStepError, match="this worker reads no images"):
        session.with_images(step, session.apply(step))
