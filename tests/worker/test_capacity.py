"""The cache gets a share of what memory there is, and a worker without room for a block does not start."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagewire_common.errors import StartError
from worker_service import capacity
from worker_service.capacity import count_device_blocks

CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 4,000 bytes available, in a control group to be filled in."""
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=4000))
    return tmp_path


def test_a_cpu_gives_a_quarter_of_what_is_available(cgroup: Path) -> None:
    assert count_device_blocks(CPU, 10, most_useful=1000, gpu_memory_utilization=0.9) == 100


def test_no_more_blocks_than_could_be_used(cgroup: Path) -> None:
    assert count_device_blocks(CPU, 10, most_useful=7, gpu_memory_utilization=0.9) == 7


@pytest.mark.parametrize(("limit", "expected"), [("1000", 20), ("max", 100), ("1000000", 100)])
def test_a_control_groups_limit_counts(limit: str, expected: int, cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(limit + "\n")
    (cgroup / "memory.current").write_text("200\n")
    assert count_device_blocks(CPU, 10, most_useful=1000, gpu_memory_utilization=0.9) == expected


def test_not_even_one_block_is_refused_with_both_numbers(cgroup: Path) -> None:
    with pytest.raises(StartError, match=r"leaves 1000 bytes .* one block takes 1001"):
        count_device_blocks(CPU, 1001, most_useful=7, gpu_memory_utilization=0.9)
