"""Reads images ahead, and waits for the reader process in a thread of its own, while the device computes."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from worker_service.execution.images.background import yield_to_steps
from worker_service.execution.images.reader_messages import Read
from worker_service.models.images.embeddings import Pixels
from worker_service.session.items import EncoderItem, ImageToEncode

MAX_KEPT = 4
"""Images that are being read, or have been read and are not yet encoded in whole. An image of 12 million pixels takes
150 MB. Further images are read again when they are encoded."""


class ImageProcessing:
    """May be used by any thread."""

    def __init__(self, read: Read, read_beside: Read | None = None) -> None:
        """See `PixelReader.read` and `PixelReader.read_beside`."""
        self._read, self._read_beside = read, read_beside or read
        self._thread = ThreadPoolExecutor(1, "images", yield_to_steps)
        self._lock = Lock()
        self._jobs: OrderedDict[EncoderItem, Future[Sequence[Pixels]]] = OrderedDict()

    def begin(self, image: ImageToEncode) -> "Future[Sequence[Pixels]]":
        """Begin to read an image, unless it is being read. The oldest job makes room."""
        with self._lock:
            job = self._job(image)
            if len(self._jobs) > MAX_KEPT:
                self._jobs.popitem(last=False)
            return job

    def look_ahead(self, images: Iterable[ImageToEncode]) -> None:
        """Begin to read images that will be encoded, in their order, while there is room."""
        with self._lock:
            for image in images:
                if len(self._jobs) == MAX_KEPT:
                    break
                self._job(image)

    def take(self, image: ImageToEncode) -> Pixels:
        """Wait for an image, and return the inputs of the part to encode. Raises what `read` raises."""
        job, part = self.begin(image), image.item.part - image.first_part
        if job.exception() is not None or part == len(job.result()) - 1:
            with self._lock:
                self._jobs.pop(_first(image), None)
        return job.result()[part]

    def _job(self, image: ImageToEncode) -> "Future[Sequence[Pixels]]":
        """The image's job, the newest from now on."""
        first, read = _first(image), self._read_beside if image.first_part else self._read
        if first not in self._jobs:
            self._jobs[first] = self._thread.submit(read, image.data, image.width, image.height)
        self._jobs.move_to_end(first)
        return self._jobs[first]


def _first(image: ImageToEncode) -> EncoderItem:
    """The first of the parts that are read together."""
    return image.item._replace(part=image.first_part)
