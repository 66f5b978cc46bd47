"""Reads the images and sounds of a JSON body: base64, data: URLs, and URLs that `Media` fetches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.images.head import MAX_BYTES, MAX_IMAGES
from scheduler_service.frontend.calls.together import run_together
from scheduler_service.frontend.checking.checks import check_length
from scheduler_service.frontend.http.body import decode_base64, too_large
from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.http.images.fetching import BusyError, FetchError, Media
from scheduler_service.frontend.http.limits import Held, Room

TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
"""Media types of images. The format is found in the content itself."""
_DATA = "data:"
_BEGINNINGS = {
    "mp3": (b"ID3", *(bytes((0xFF, 0xE0 | rest)) for rest in range(32))),
    "wav": (b"RIFF", b"RIFX", b"RF64"),
}
SOUND_FORMATS = tuple(sorted(_BEGINNINGS))
"""Formats of sounds in chats of OpenAI's API."""


class ImageSource(NamedTuple):
    """An image of a body, or a sound. `place`: its name in errors. `data`: base64; None for an image at `url`.
    `format`: the format that is stated for a sound."""

    place: str
    url: str = ""
    data: str | None = None
    format: str = ""


ContentPart = str | ImageSource
"""A part of a message's content."""


def joined_parts(parts: Iterable[ContentPart], between: str = "\n") -> list[ContentPart]:
    """The parts with successive texts as paragraphs of one text."""
    found: list[ContentPart] = []
    texts: list[str] = []
    for part in (*parts, None):
        if isinstance(part, str):
            texts += [part] if part else []
            continue
        found += [between.join(texts)] if texts else []
        found += [part] if part is not None else []
        texts = []
    return found


def content_of(parts: Iterable[ContentPart], between: str = "\n") -> Any:
    """Parts as the content of a message of OpenAI's chat completions, which has an `ImageSource` for each image."""
    joined = joined_parts(parts, between)
    if all(isinstance(part, str) for part in joined):
        return "".join(map(str, joined))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in joined]


@dataclass(slots=True)
class ImageReader:
    """Reads the images of one request.

    `is_possible`: the model reads images. `reads`: the contents that it reads, for errors. `num_body_bytes`: the size
    of the body. `most_body_bytes`: the largest size of its part without images.
    """

    is_possible: bool = False
    reads: str = "text alone"
    media: Media = field(default_factory=Media)
    held: Held = field(default_factory=lambda: Held(Room()))
    num_body_bytes: int = 0
    most_body_bytes: int = 0
    hears: bool = False
    """True for a model that reads sounds."""
    _num_fetched: int = 0

    @property
    def _kind(self) -> str:
        return "sounds" if self.hears else "images"

    def check_rest(self, sources: Sequence[ImageSource]) -> None:
        """Refuse a body that is large without its images. Raises HttpError."""
        num_bytes = self.num_body_bytes - sum(len(source.url) + len(source.data or "") for source in sources)
        if num_bytes > self.most_body_bytes:
            raise too_large(num_bytes, self.most_body_bytes, f"without its {self._kind}")

    async def read(self, sources: Sequence[ImageSource]) -> list[pb.Image]:
        """Raises HttpError and RequestError."""
        check_length(self._kind, len(sources), MAX_IMAGES)
        return await run_together(map(self._read, sources))

    async def _read(self, source: ImageSource) -> pb.Image:
        place, url, data, stated = source
        if data is None and url[: len(_DATA)].lower() != _DATA:
            try:
                return pb.Image(data=await self.media.fetch(url, self._take, self.held.client))
            except BusyError as error:
                raise HttpError(503, "overloaded", f"{place} cannot be fetched: {error}") from None
            except FetchError as error:
                raise _refused(place, f"cannot be fetched: {error}") from None
        if data is None:
            head, _, data = url.partition(",")
            _check_head(place, head[len(_DATA) :])
        self.held.take(3 * len(data))  # as text, decoded, and in a request
        decoded = await decode_base64(place, data)
        if stated and not decoded.startswith(_BEGINNINGS[stated]):
            raise _refused(place, f"does not begin as a file of the format {stated}")
        return pb.Image(data=decoded)

    def _take(self, num_bytes: int) -> None:
        """Count a piece of a fetched image."""
        self._num_fetched += num_bytes
        if self._num_fetched > MAX_BYTES:
            raise FetchError(f"the images of a request together have at most {MAX_BYTES} bytes")
        self.held.take(2 * num_bytes)


def _check_head(place: str, head: str) -> None:
    kind, *settings = head[:256].lower().split(";")
    if kind not in TYPES:
        raise _refused(place, f"is a data: URL of the type {kind[:64]!r}; it must be one of {', '.join(TYPES)}")
    if settings[-1:] != ["base64"]:
        raise _refused(place, f"is a data: URL without base64; it must begin with data:{kind};base64,")


def _refused(place: str, reason: str) -> HttpError:
    return invalid(f"{place} {reason}", place.partition("[")[0])
