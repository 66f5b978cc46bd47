"""Encodes the images of a step, keeps their embeddings as long as the scheduler says, and finds the tokens of a step
that they replace."""

import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from worker_service.errors import is_out_of_memory
from worker_service.execution.images.processing import MAX_KEPT, ImageProcessing
from worker_service.models.images.embeddings import ImageEmbeddings, Pixels
from worker_service.session.items import EncoderItem, ImageToEncode, PromptItem
from worker_service.session.sequence_state import SequenceState
from worker_service.session.step import SchedulerOutput

log = structlog.get_logger()


class Tower(Protocol):
    def encode(self, pixels: Pixels) -> ImageEmbeddings:
        """See `ImageTower.encode`."""


class Encoded(NamedTuple):
    """The result of encoding a step's images."""

    failed: Sequence[EncoderItem] = ()
    """Images that could not be read."""
    encode_us: int = 0


NONE_ENCODED = Encoded()


class ImageEncoder:
    """Only the device thread uses the embeddings."""

    def __init__(self, tower: Tower, processing: ImageProcessing, image_token_id: int) -> None:
        self.processing = processing
        self._tower = tower
        self._image_token_id = image_token_id
        # None for an image that could not be read.
        self._held: dict[EncoderItem, ImageEmbeddings | None] = {}

    def encode(self, output: SchedulerOutput) -> Encoded:
        """Drop and encode what the step says. Parts are encoded one by one, so that the bits of one do not depend on
        others."""
        if output.step_id == 1:  # of a new session
            self._held.clear()
        for item in output.dropped_embeddings:
            self._held.pop(item, None)
        began, failed = time.perf_counter(), []
        for place, image in enumerate(output.images):
            self.processing.look_ahead(islice(output.images, place, place + 1 + MAX_KEPT))
            self._held[image.item] = found = self._encode(image)
            if found is None:
                failed.append(image.item)
        self.processing.look_ahead(output.images_ahead)
        return Encoded(failed, round((time.perf_counter() - began) * 1e6) if output.images else 0)

    def within(
        self, sequence: SequenceState, item: PromptItem, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], ImageEmbeddings | None]:
        """The image tokens among a sequence's tokens [start, stop) of an item, and their embeddings. None if the
        image could not be read."""
        assert item.encoded is not None
        is_image = np.array(sequence.token_ids[item.start : stop]) == self._image_token_id
        (places,) = np.nonzero(is_image[start - item.start :])
        whole = self._held[item.encoded]
        if whole is None:
            return places + start, None
        first = int(np.count_nonzero(is_image[: start - item.start]))
        part = slice(first, first + len(places))
        return places + start, ImageEmbeddings(whole.embeddings[part], [layer[part] for layer in whole.deep])

    def _encode(self, image: ImageToEncode) -> ImageEmbeddings | None:
        try:
            found = self._tower.encode(self.processing.take(image))
            if len(found.embeddings) != image.num_embeddings:
                raise ValueError(
                    f"the network has {len(found.embeddings)} embeddings for {image.num_embeddings} tokens"
                )
        # Files may be of any content, and the code of networks may raise any error for unusual sizes.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            log.warning("an image cannot be encoded", reason=f"{type(error).__name__}: {error}")
            return None
        return found
