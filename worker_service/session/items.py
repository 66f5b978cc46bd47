"""Parts of a prompt that are not text: embeddings, and images that the worker encodes."""

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Embeddings:
    """Embeddings in place of token ids."""

    dtype: str
    """The type's name in safetensors: F32, F16 or BF16."""
    num_embeddings: int
    data: memoryview
    """[num_embeddings, size], little-endian."""

    @property
    def row_bytes(self) -> int:
        return len(self.data) // self.num_embeddings


class EncoderItem(NamedTuple):
    """Names an image, or a part of one that is encoded on its own."""

    digest: bytes
    part: int


class ImagePart(NamedTuple):
    """An image, or a part of one, in a prompt. Tokens with the image's token id are replaced by its embeddings."""

    part: int
    width: int
    """Pixels of the whole image, after the rotation in its EXIF data."""
    height: int
    grid: tuple[int, int] | None = None
    """Rows and columns of embeddings, if they have positions in three axes."""
    data: bytes = b""
    """The whole image's file; empty if the session has it already, or if the sequence does not need it."""

    @property
    def shift(self) -> int:
        """The number of its positions, which is the longer side of its grid, minus that of its embeddings."""
        return max(self.grid) - math.prod(self.grid) if self.grid is not None else 0


class PromptItem(NamedTuple):
    """Embeddings or an image in place of a prompt's tokens [start, stop)."""

    digest: bytes
    start: int
    stop: int
    embeddings: Embeddings | None = None
    """None for an image, if the session has them already, or if the sequence does not need them."""
    image: ImagePart | None = None
    shift: int = 0
    """Position minus place of the tokens between this item and the next, if positions have three axes."""

    @property
    def lacks_embeddings(self) -> bool:
        """Whether given embeddings are missing. Those of an image are computed."""
        return self.embeddings is None and self.image is None

    @property
    def encoded(self) -> EncoderItem | None:
        """The name of an image's embeddings; None for given embeddings."""
        return None if self.image is None else EncoderItem(self.digest, self.image.part)


class ImageToEncode(NamedTuple):
    """An image, or a part of one, that a step encodes, or a later step will need."""

    item: EncoderItem
    width: int
    height: int
    data: bytes
    """The whole image's file."""
    num_tokens: int = 0
    """The number of tokens from the first to the last that the item replaces."""
    num_embeddings: int = 0
    """The number of these tokens that are image tokens."""
    first_part: int = 0
    """See `ImageLayout`."""
