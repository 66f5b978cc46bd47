"""Images are read in a process that may be killed, by files or from outside."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch

from worker_service.execution.images.reader_process import ReaderProcess
from worker_service.models.images.embeddings import Pixels


def read(data: bytes, width: int, height: int) -> Sequence[Pixels]:
    """Two parts, of which the second is no contiguous tensor. Some files kill the process, or are damaged."""
    if data == b"kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if data == b"large":
        torch.empty(5 << 30, dtype=torch.uint8)
    if data == b"damaged":
        raise ValueError("is cut off")
    whole = torch.tensor([*data, os.nice(0)], dtype=torch.bfloat16)
    return [{"pixel_values": whole}, {"sizes": torch.arange(width * height).reshape(height, width).T, "no": whole[:0]}]


@pytest.fixture(scope="module")
def process() -> Iterator[ReaderProcess]:
    process = ReaderProcess()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # with this module
        assert process.begin(read)(b"at once", 1, 1)[0]["pixel_values"][-1] == os.nice(0), "images wait for the start"
        assert process.has_started.wait(60)
        yield process
    process._close()


def test_tensors_come_as_they_were_read_by_a_process_of_low_priority(process: ReaderProcess) -> None:
    (first, second) = process.begin(read)(b"file", 3, 2)
    assert first["pixel_values"].dtype is torch.bfloat16
    assert first["pixel_values"].tolist() == [*b"file", os.nice(0) + 5]
    assert second["sizes"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (second["sizes"].dtype, second["no"].shape) == (torch.int64, (0,))


def test_a_file_is_read_again_after_the_process_was_killed(process: ReaderProcess) -> None:
    read_there = process.begin(read)
    read_there(b"one", 1, 1)
    assert process.process is not None
    process.process.kill()
    process.process.wait()
    assert read_there(b"two", 1, 1)[0]["pixel_values"].tolist()[:3] == [*b"two"]


def test_a_file_that_kills_the_process_takes_too_much_memory_or_is_damaged_fails_alone(process: ReaderProcess) -> None:
    read_there = process.begin(read)
    for data, reason in ((b"kills", "was killed"), (b"large", "allocate"), (b"damaged", "ValueError: is cut off")):
        with pytest.raises(ValueError, match=reason):
            read_there(data, 1, 1)
        assert read_there(b"good", 1, 1)[0]["pixel_values"].tolist()[:4] == [*b"good"]
