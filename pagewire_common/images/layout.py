"""The tokens of an image in a prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


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
    """

    token_ids: tuple[int, ...]
    parts: tuple[ImagePart, ...]
    grid: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ImageLayouts:
    """How a model reads images.

    `family`: the `model_type` of config.json.
    `image_token_id`: tokens with this id are replaced by embeddings.
    `placeholder_id`: the token that the chat template writes once for each image.
    `of`: the layout of an image of (width, height) pixels. Raises ValueError with the rest of a sentence that
    begins with the image's name.
    """

    family: str
    image_token_id: int
    placeholder_id: int
    of: Callable[[int, int], ImageLayout]
