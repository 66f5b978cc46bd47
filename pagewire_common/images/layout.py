"""The tokens of an image in a prompt."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np


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
    `attends_both_ways`: whether the tokens of a part attend to each other in both directions.
    `newlines`: the tokens of no newline, of one, of two, and so on, for families whose layouts begin or end with
    newlines, which the tokenizer joins with the text's.
    """

    family: str
    image_token_id: int
    placeholder_id: int
    of: Callable[[int, int], ImageLayout]
    attends_both_ways: bool = False
    newlines: Sequence[Sequence[int]] = ()

    def join_newlines(self, token_ids: Sequence[int], starts: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Write successive newlines as the tokenizer writes them. `starts`: places of other tokens in `token_ids`.
        Returns both."""
        numbers = {run[0]: number for number, run in enumerate(self.newlines) if len(run) == 1}
        are_newlines = np.isin(np.asarray(token_ids), [*numbers]).tolist()
        found: list[int] = []
        ends, removed = [0], [0]
        for is_run, group in groupby(range(len(token_ids)), are_newlines.__getitem__):
            tokens = [token_ids[place] for place in group]
            number = sum(numbers[token] for token in tokens) if is_run and len(tokens) > 1 else len(self.newlines)
            found += self.newlines[number] if number < len(self.newlines) else tokens
            ends.append(ends[-1] + len(tokens))
            removed.append(ends[-1] - len(found))
        moved = [start - removed[bisect_right(ends, start) - 1] for start in starts]
        return found, moved
