"""How many KV cache blocks a device has room for, once the weights lie there and the largest step is known to fit."""

from pathlib import Path

import psutil
import torch

from pagewire_common.errors import StartError

_CPU_SHARE = 4
"""A quarter of a machine's free memory: other workers and processes live there too."""
_CGROUP = Path("/sys/fs/cgroup")


def count_device_blocks(device: torch.device, block_bytes: int, most_useful: int, gpu_memory_utilization: float) -> int:
    """At least one block, and on a CPU at most `most_useful`. Raises StartError where not even one has room."""
    if device.type == "cuda":
        free = _free_cuda_bytes(device, gpu_memory_utilization)
        count = free // block_bytes
    else:
        free = _free_host_bytes() // _CPU_SHARE
        count = min(free // block_bytes, most_useful)
    if count < 1:
        raise StartError(
            f"the model leaves {max(free, 0)} bytes for the KV cache on {device.type}, and one block takes "
            f"{block_bytes}; free some memory, or lower --block-size or --max-num-batched-tokens"
        )
    return count


def _free_cuda_bytes(device: torch.device, utilization: float) -> int:
    """What our share of the GPU leaves beside the highest use so far, ours and that of others."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(utilization * total) - others - torch.cuda.max_memory_allocated(device)


def _free_host_bytes() -> int:
    """What the machine has available, or what the control group still allows if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - current)
