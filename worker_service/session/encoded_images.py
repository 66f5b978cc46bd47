"""The session's copy of the encoder cache: which images the worker keeps encoded. The scheduler decides what is encoded
and dropped; a step that contradicts the worker's limits is refused."""

from collections.abc import Iterable, Sequence

from worker_service.errors import InvalidStepError
from worker_service.session.items import EncoderItem, ImageToEncode
from worker_service.session.prompt_items import SessionItems
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import Limits


class EncodedImages:
    def __init__(self, limits: Limits, items: SessionItems) -> None:
        self._limits = limits
        self._items = items
        self._sizes: dict[EncoderItem, int] = {}
        self._num_tokens = 0

    def drop(self, items: Iterable[EncoderItem]) -> None:
        for item in items:
            self._num_tokens -= self._sizes.pop(item, 0)

    def encode(self, items: Sequence[EncoderItem]) -> tuple[ImageToEncode, ...]:
        """Record that a step encodes images. Returns them with their files. Raises InvalidStepError."""
        images = []
        for item in items:
            image = self._items.image(item)
            if image is None or item in self._sizes:
                why = "is encoded already" if image is not None else "is of no image that this session has"
                raise InvalidStepError(f"items_to_encode: part {item.part} of {item.digest.hex()} {why}")
            self._sizes[item] = image.num_tokens
            images.append(image)
        added = sum(image.num_tokens for image in images)
        self._num_tokens += added
        if len(images) > 1 and added > self._limits.encoder_budget:
            budget = self._limits.encoder_budget
            raise InvalidStepError(f"items_to_encode: {added} tokens in one step; the limit of several is {budget}")
        if self._num_tokens > (most := self._limits.encoder_cache_size):
            raise InvalidStepError(f"items_to_encode: the cache would have {self._num_tokens} tokens of {most}")
        return tuple(images)

    def check(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Raise InvalidStepError if a chunk needs an image that is not encoded, or ends inside an image whose tokens
        attend to each other in both directions."""
        attends_both_ways = self._limits.images is not None and self._limits.images.attends_both_ways
        for chunk in chunks:
            for item, start, stop in chunk.parts_of_items() if chunk.sequence.items else ():
                if attends_both_ways and item.encoded is not None and stop < item.stop:
                    raise InvalidStepError(
                        f"sequence {chunk.sequence.sequence_id} computes tokens {start} to {stop - 1} of an image that "
                        f"ends with token {item.stop - 1}; its tokens attend to each other in both directions"
                    )
                if item.encoded is not None and item.encoded not in self._sizes:
                    raise InvalidStepError(
                        f"sequence {chunk.sequence.sequence_id} computes token {start}, whose image is not encoded"
                    )

    def ahead(self, items: Iterable[EncoderItem]) -> tuple[ImageToEncode, ...]:
        """The images to prepare, without those that are encoded, or whose sequences have left in this step."""
        images = [self._items.image(item) for item in items if item not in self._sizes]
        return tuple(image for image in images if image is not None)
