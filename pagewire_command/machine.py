"""Facts of this machine that decide whether and how fast a worker runs."""

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PORTS = {8000: "HTTP", 50051: "gRPC", 50052: "a worker", 50053: "operators' commands"}
"""The default ports, and what is served on each."""


@dataclass(frozen=True)
class Gpu:
    name: str
    bytes: int
    free_bytes: int


def usable_cores() -> float:
    """Cores of this process, by affinity and by the control group's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def memory_limit() -> int | None:
    """Bytes that the control group allows; None for no limit."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # also for "max"
        return None


def free_disk(folder: Path) -> int:
    """Free bytes for a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found.append(Gpu(torch.cuda.get_device_name(number), total, free))
    return found
