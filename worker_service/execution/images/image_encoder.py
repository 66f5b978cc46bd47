"""Encodes images, keeps their embeddings as long as the scheduler says, and finds the tokens of a step that they
replace.

Images that sequences need next are encoded in the background, in the order in which the scheduler named them first. A
step that encodes such an image takes the result, or waits for it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from threading import Event
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from worker_service.errors import is_out_of_memory
from worker_service.execution.images.background import BackgroundThread
from worker_service.execution.images.processing import ImageProcessing
from worker_service.models.images.embeddings import ImageEmbeddings, Pixels
from worker_service.session.items import EncoderItem, ImageToEncode, PromptItem
from worker_service.session.sequence_state import SequenceState
from worker_service.session.step import SchedulerOutput

log = structlog.get_logger()

MAX_AHEAD = 4
"""Images that are encoded before a step needs them."""
REPORT_SECONDS = 0.1
"""Seconds for which a step without sequences waits for a further image. A scheduler that sends no step before the
answer to the last would let arriving requests wait for so long."""


class Tower(Protocol):
    def encode(self, pixels: Pixels) -> ImageEmbeddings:
        """See `ImageTower.encode`."""


class Encoded(NamedTuple):
    """The result of encoding a step's images."""

    failed: Sequence[EncoderItem] = ()
    """Images that could not be read."""
    encode_us: int = 0
    """The time for which the step waited."""
    prepared: Sequence[EncoderItem] = ()
    """The images that have been encoded ahead."""


NONE_ENCODED = Encoded()


class ImageEncoder:
    """Only the device thread calls these methods, except `received`."""

    def __init__(
        self, tower: Tower, processing: ImageProcessing, image_token_id: int, *, attends_both_ways: bool = False
    ) -> None:
        """attends_both_ways: see `ImageLayouts`."""
        self.processing = processing
        self.attends_both_ways = attends_both_ways
        self._tower = tower
        self._image_token_id = image_token_id
        # None for an image that could not be read.
        self._held: dict[EncoderItem, ImageEmbeddings | None] = {}
        self._thread = BackgroundThread("encoder")
        self._jobs: dict[EncoderItem, Future[ImageEmbeddings | None]] = {}
        self._reported: frozenset[EncoderItem] = frozenset()
        self._newest = (0, 0)
        # Set when a step was received, or a job is done.
        self._woken = Event()

    def received(self, epoch: int, step_id: int) -> None:
        """Note the newest step that this process has received. May be called by any thread."""
        self._newest = epoch, step_id
        self._woken.set()

    def encode(self, output: SchedulerOutput) -> Encoded:
        """Drop and encode what the step says, and begin what later steps need. Parts are encoded one by one, so that
        the bits of one do not depend on others."""
        if output.step_id == 1:  # of a new session
            self._held.clear()
            self._stop_all()
        for item in output.dropped_embeddings:
            self._held.pop(item, None)
        if not (output.images or output.images_ahead or self._jobs):
            return NONE_ENCODED
        began, failed = time.perf_counter(), []
        self._begin(output)
        for image in output.images:
            self._held[image.item] = found = self._jobs[image.item].result()
            self._stop(image.item)
            if found is None:
                failed.append(image.item)
        if waits := not output.sequence_ids:
            self._wait(output, began + REPORT_SECONDS)
        self._reported = self._prepared()
        waited = time.perf_counter() - began if output.images or waits else 0.0
        return Encoded(failed, round(waited * 1e6), [*self._reported])

    def _prepared(self) -> frozenset[EncoderItem]:
        return frozenset(item for item, job in self._jobs.items() if job.done())

    def _wait(self, output: SchedulerOutput, until: float) -> None:
        """Wait for an image that was not reported, while this step is the newest received and images are missing."""
        is_woken = True
        while is_woken:
            self._woken.clear()
            prepared = self._prepared()
            is_missing = prepared <= self._reported and len(prepared) < len(self._jobs)
            if not is_missing or self._newest != (output.epoch, output.step_id):
                return
            is_woken = self._woken.wait(max(0.0, until - time.perf_counter()))

    def _begin(self, output: SchedulerOutput) -> None:
        """Begin to encode the step's images, then those of later steps, and stop what no sequence needs any more."""
        ahead = {image.item: image for image in output.images_ahead}
        needed = {image.item: image for image in output.images}
        for item, job in [*self._jobs.items()]:
            if item not in needed and (item not in ahead or (needed and job.cancel())):
                self._stop(item)
        for item, image in (needed | dict(islice(ahead.items(), MAX_AHEAD))).items():
            if item not in self._jobs:
                self.processing.look_ahead([image])
                self._jobs[item] = self._thread.submit(partial(self._encode, image))
                self._jobs[item].add_done_callback(lambda _: self._woken.set())

    @property
    def is_busy(self) -> bool:
        """Whether the background thread encodes an image. The encoding cannot be interrupted."""
        return self._thread.is_busy

    def _stop(self, item: EncoderItem) -> None:
        self._jobs.pop(item).cancel()

    def _stop_all(self) -> None:
        for item in [*self._jobs]:
            self._stop(item)

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

    @torch.inference_mode()
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
