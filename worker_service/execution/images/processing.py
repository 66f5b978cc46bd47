"""Reads images in a thread of its own, while the device computes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from worker_service.models.images.embeddings import Pixels
from worker_service.session.items import ImageToEncode

_MAX_KEPT = 4
"""Images that are being read, or have been read and are not yet encoded in whole. An image of 12 million pixels takes
150 MB. Further images are read again when they are encoded."""


class ImageProcessing:
    def __init__(self, read: Callable[[bytes, int, int], Sequence[Pixels]]) -> None:
        """read: see `PixelReader.read`."""
        self._read = read
        self._thread = ThreadPoolExecutor(1, "images")
        self._lock = Lock()
        self._jobs: OrderedDict[bytes, Future[Sequence[Pixels]]] = OrderedDict()

    def begin(self, image: ImageToEncode) -> "Future[Sequence[Pixels]]":
        """Begin to read an image, unless it is being read. May be called by any thread."""
        with self._lock:
            job = self._jobs.get(image.item.digest)
            if job is None:
                job = self._thread.submit(self._read, image.data, image.width, image.height)
                self._jobs[image.item.digest] = job
                if len(self._jobs) > _MAX_KEPT:
                    self._jobs.popitem(last=False)
            self._jobs.move_to_end(image.item.digest)
            return job

    def take(self, image: ImageToEncode) -> Pixels:
        """Wait for an image, and return the inputs of the part to encode. Raises what `read` raises."""
        job, part = self.begin(image), image.item.part
        if job.exception() is not None or part == len(job.result()) - 1:
            with self._lock:
                self._jobs.pop(image.item.digest, None)
        return job.result()[part]
