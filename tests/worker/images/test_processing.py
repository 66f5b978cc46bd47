"""Images are read in a thread, each once while there is room."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from worker_service.execution.images.image_encoder import MAX_AHEAD, ImageEncoder
from worker_service.execution.images.processing import MAX_KEPT, ImageProcessing
from worker_service.models.images.embeddings import ImageEmbeddings, Pixels
from worker_service.session.items import EncoderItem, ImageToEncode
from worker_service.session.step import SchedulerOutput


def image(number: int, part: int = 0) -> ImageToEncode:
    return ImageToEncode(EncoderItem(bytes([number]), part), 1, 1, bytes([number]))


class Reader:
    """Two parts of each image. Empty files are no images."""

    def __init__(self) -> None:
        self.read: list[bytes] = []

    def __call__(self, data: bytes, width: int, height: int) -> list[Pixels]:
        self.read.append(data)
        if data == b"\0":
            raise ValueError("is damaged")
        return [{"pixel_values": torch.tensor([data[0], part])} for part in range(2)]


def test_an_image_is_read_once_for_all_its_parts() -> None:
    processing = ImageProcessing(reader := Reader())
    processing.begin(image(7))
    with ThreadPoolExecutor() as threads:
        found = [*threads.map(processing.take, [image(7), image(7, 1)])]
    assert [pixels["pixel_values"].tolist() for pixels in found] == [[7, 0], [7, 1]]
    assert reader.read == [b"\7"]


def test_images_ahead_displace_none_that_a_step_encodes_and_take_no_further_room() -> None:
    processing = ImageProcessing(reader := Reader())
    processing.begin(image(1))
    for _ in range(3):  # each step names them again
        processing.look_ahead([image(number) for number in range(2, 20)])
    processing.begin(image(90)).result()  # displaces the oldest
    assert reader.read == [bytes([number]) for number in [*range(1, MAX_KEPT + 1), 90]]
    assert processing.take(image(1, 1))["pixel_values"].tolist() == [1, 1]  # read again
    assert reader.read[-1] == b"\1"


def test_a_file_that_is_no_image_raises_in_the_thread_that_needs_it() -> None:
    processing = ImageProcessing(Reader())
    processing.look_ahead([image(0)])
    for _ in range(2):
        with pytest.raises(ValueError, match="is damaged"):
            processing.take(image(0))


def output(step_id: int, **options: object) -> SchedulerOutput:
    """A step that has sequences."""
    return SchedulerOutput(1, step_id, sequence_ids=(1,), **options)  # type: ignore[arg-type]


class Tower:
    def encode(self, pixels: Pixels) -> ImageEmbeddings:
        return ImageEmbeddings(pixels["pixel_values"])


class SlowTower(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = Event(), Event()

    def encode(self, pixels: Pixels) -> ImageEmbeddings:
        self.begun.set()
        assert self.goes_on.wait(60)
        return super().encode(pixels)


def test_a_step_of_many_images_reads_each_once() -> None:
    processing = ImageProcessing(reader := Reader())
    images = tuple(image(1 + n // 2, n % 2)._replace(num_embeddings=2) for n in range(8 * MAX_KEPT))
    assert ImageEncoder(Tower(), processing, 0).encode(output(1, images=images)).failed == []
    assert reader.read == [bytes([1 + n]) for n in range(4 * MAX_KEPT)]


def test_images_that_later_steps_need_are_encoded_meanwhile_and_reported() -> None:
    encoder = ImageEncoder(Tower(), ImageProcessing(reader := Reader()), 0)
    ahead = tuple(image(number)._replace(num_embeddings=2) for number in (1, 2))
    encoder.encode(output(1, images_ahead=ahead))
    for job in encoder._jobs.values():
        job.result()
    assert {*encoder.encode(output(2, images_ahead=ahead)).prepared} == {one.item for one in ahead}
    found = encoder.encode(output(3, images=ahead[:1], images_ahead=ahead[1:]))
    assert (found.failed, found.prepared, reader.read) == ([], [ahead[1].item], [b"\1", b"\2"])
    encoder.encode(output(4))
    assert not encoder._jobs, "an image that no sequence needs any more is kept"


def test_a_step_does_not_wait_for_images_of_later_steps() -> None:
    encoder = ImageEncoder(tower := SlowTower(), ImageProcessing(Reader()), 0)
    ahead = tuple(image(number)._replace(num_embeddings=2) for number in range(1, 9))
    assert encoder.encode(output(1, images_ahead=ahead)).prepared == []
    assert tower.begun.wait(60)
    assert len(encoder._jobs) == MAX_AHEAD
    tower.goes_on.set()
    last = encoder.encode(output(2, images=ahead[7:], images_ahead=ahead[:7]))
    assert last.failed == []
    assert [*encoder._held] == [ahead[7].item]


def test_a_step_without_sequences_is_answered_when_an_image_is_prepared_or_another_step_was_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_service.execution.images.image_encoder.REPORT_SECONDS", 60)
    encoder = ImageEncoder(tower := SlowTower(), ImageProcessing(Reader()), 0)
    ahead = (image(1)._replace(num_embeddings=2),)
    with ThreadPoolExecutor() as threads:
        encoder.received(1, 1)
        first = threads.submit(encoder.encode, SchedulerOutput(1, 1, images_ahead=ahead))
        assert tower.begun.wait(60)
        encoder.received(1, 2)
        assert first.result(30).prepared == []
        second = threads.submit(encoder.encode, SchedulerOutput(1, 2, images_ahead=ahead))
        tower.goes_on.set()
        assert second.result(30).prepared == [ahead[0].item]
