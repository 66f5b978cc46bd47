"""The tokens of an image in a prompt."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BESIDE = 1 << 16
"""The number of the first part of an image beside others, in families that then encode it in another way."""


class ImagePart(NamedTuple):
    """A half-open range of an image's tokens, from the first to the last image token of a part that is encoded on its
    own: the whole image, or one tile."""

    start: int
    stop: int


class ImageLayout(NamedTuple):
    """The tokens of one image.

    `token_ids`: replace the placeholder token of the image.
    `parts`: in the order of the tokens, and of the tiles that the image processor of transformers returns.
    `grid`: rows and columns of embeddings, for families with positions in three axes; otherwise None.
    `first_part`: the number of the first part, see `ImageLayouts.beside`.
    """

    token_ids: tuple[int, ...]
    parts: tuple[ImagePart, ...]
    grid: tuple[int, int] | None = None
    first_part: int = 0


@dataclass(frozen=True, slots=True)
class ImageLayouts:
    """How a model reads images.

    `family`: the `model_type` of config.json.
    `image_token_id`: tokens with this id are replaced by embeddings.
    `placeholder_id`: the token that the chat template writes once for each image.
    `of`: the layout of an image of (width, height) pixels. Raises ValueError with the rest of a sentence that
    begins with the image's name.
    `attends_both_ways`: whether the tokens of a part attend to each other in both directions.
    `newlines`: the tokens of no newline, of one, of two, and so on, for families whose layouts begin or end with
    newlines, which the tokenizer joins with the text's.
    `max_samples`: the samples of one sound at most, for families that read sounds.
    `beside`: like `of`, for an image beside other images in its prompt, if its tokens differ from an only image's.
    The layout's parts have the numbers from `BESIDE`.
    """

    family: str
    image_token_id: int
    placeholder_id: int
    of: Callable[[int, int], ImageLayout]
    attends_both_ways: bool = False
    newlines: Sequence[Sequence[int]] = ()
    beside: Callable[[int, int], ImageLayout] | None = None
    max_samples: int = 0

    def among(self, num_images: int, width: int, height: int) -> ImageLayout:
        """The layout of an image in a prompt of so many images. Raises ValueError like `of`."""
        return self.of_part(BESIDE if num_images > 1 else 0, width, height)

    def of_part(self, number: int, width: int, height: int) -> ImageLayout:
        """The layout that has the part of this number, if the image has such a part. Raises ValueError like `of`."""
        return self.of(width, height) if self.beside is None or number < BESIDE else self.beside(width, height)

    def join_newlines(self, before: "array[int]", after: "array[int]") -> "array[int]":
        """Move the newlines at the end of `before` to the beginning of `after`. The tokenizer has tokens of several
        newlines, so the newlines of both are written anew. Returns the new `after`."""
        numbers = {run[0]: number for number, run in enumerate(self.newlines) if len(run) == 1}
        first, stop, number = len(before), 0, 0
        while first and before[first - 1] in numbers and number < len(self.newlines):
            first -= 1
            number += numbers[before[first]]
        while first < len(before) and stop < len(after) and after[stop] in numbers and number < len(self.newlines):
            number += numbers[after[stop]]
            stop += 1
        if not stop or number >= len(self.newlines):
            return after
        del before[first:]
        return array("I", self.newlines[number]) + after[stop:]
