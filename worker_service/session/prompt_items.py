"""The items of prompts that a session has, by digest. The scheduler says when to drop an item, and sends it again
only after that."""

from collections.abc import Iterable

from pagewire_common.images.layout import ImageLayouts
from worker_service.errors import InvalidStepError
from worker_service.session.items import Embeddings, EncoderItem, ImagePart, ImageToEncode, PromptItem
from worker_service.session.step import NewSequence


class SessionItems:
    def __init__(self, layouts: ImageLayouts | None = None) -> None:
        """layouts: required if prompts contain images."""
        self._layouts = layouts
        self._known: dict[bytes, Embeddings] = {}
        self._images: dict[bytes, ImagePart] = {}

    def drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._known.pop(digest, None)
            self._images.pop(digest, None)

    def take(self, new: NewSequence) -> tuple[PromptItem, ...]:
        """The items of a new sequence, with the embeddings that its steps or those of its forks may read. Images are
        without their files.

        The last prompt token may be computed again: by a fork, or by a late sequence. Raises InvalidStepError if the
        session lacks embeddings that are needed."""
        found = []
        for item in new.items:
            if item.image is not None:
                found.append(self._take_image(item, item.image))
                continue
            if item.embeddings is not None:
                self._known[item.digest] = item.embeddings
            embeddings = self._known.get(item.digest)
            is_needed = item.stop > min(new.num_computed_tokens, new.num_prompt_tokens - 1)
            if is_needed and (embeddings is None or embeddings.num_embeddings != item.stop - item.start):
                raise InvalidStepError(f"sequence {new.sequence_id}: item at token {item.start} came without its data")
            found.append(item._replace(embeddings=embeddings))
        return tuple(found)

    def image(self, item: EncoderItem) -> ImageToEncode | None:
        """An image with its file; None if the session lacks it, or if it has no such part."""
        whole = self._images.get(item.digest)
        if whole is None:
            return None
        assert self._layouts is not None
        layout = self._layouts.of_part(item.part, whole.width, whole.height)
        number = item.part - layout.first_part
        if number >= len(layout.parts):
            return None
        start, stop = layout.parts[number]
        num_embeddings = layout.token_ids[start:stop].count(self._layouts.image_token_id)
        return ImageToEncode(
            item, whole.width, whole.height, whole.data, stop - start, num_embeddings, layout.first_part
        )

    def _take_image(self, item: PromptItem, image: ImagePart) -> PromptItem:
        if image.data:
            self._images[item.digest] = image
        return item._replace(image=image._replace(data=b""))
