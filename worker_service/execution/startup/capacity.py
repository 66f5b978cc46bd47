"""Checks that the weights fit into memory, and counts the KV cache blocks that fit.

Blocks are counted after the weights are loaded and a trial step of the largest size has run. If one sequence of full
length does not fit, the worker refuses to start, because such a request would wait forever."""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from kernels.backends import ops_for
from pagewire_common.start_error import StartError
from worker_service.execution.cache.cache_engine import CacheShape
from worker_service.parallel.ranks import ALONE, Ranks
from worker_service.settings import WorkerSettings

_CPU_SHARE = 4
"""Divisor of a CPU's free memory for the maximum KV cache, because other processes need memory, too."""
_GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


def check_room_for_weights(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int], ranks: Ranks = ALONE
) -> None:
    """Raise StartError if the weights do not fit, before any is loaded: a machine without free memory becomes very
    slow.

    sizes: bytes of each weight of this rank. On a CPU the weights of all ranks must fit."""
    num_bytes = sum(sizes)
    if device.type == "cpu":
        # While a weight is packed, plain and packed weight are both in memory. An embedding that is also the output
        # layer may stay in memory twice. The embedding is a large weight and may be in float32.
        num_bytes += max(sizes) * ops_for(device).wide_itemsize(dtype) // dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    if device.type == "cpu":
        num_bytes = sum(ranks.gather_numbers(num_bytes))
    if num_bytes > free:
        raise StartError(
            f"the weights take {num_bytes / _GIB:.2f} GiB, and {device.type} has {free / _GIB:.2f} GiB of memory free; "
            "choose a smaller model or a --dtype of fewer bits, or free some memory"
        )


def count_device_blocks(
    device: torch.device,
    shapes: Sequence[CacheShape],
    max_model_len: int,
    sliding_window: int,
    settings: WorkerSettings,
    ranks: Ranks = ALONE,
    least_model_len: int | None = None,
) -> int:
    """The number of device blocks: `--num-gpu-blocks-override`, or as many as fit. Raises StartError if one sequence
    needs more.

    shapes: this rank's part of a block in each cache. All caches and ranks have equally many blocks. sliding_window:
    tokens, or 0; the scheduler frees blocks behind the window. least_model_len: tokens of the sequence that must fit,
    by default `max_model_len`."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    own_bytes = sum(shape.block_bytes for shape in shapes)

    def blocks_for(num_tokens: int) -> int:
        return blocks_of(num_tokens, shapes[0], sliding_window, settings.max_num_batched_tokens)

    needed, least_model_len = blocks_for(max_model_len), min(max_model_len, least_model_len or max_model_len)
    block_bytes = sum(ranks.gather_numbers(own_bytes))
    if settings.kv_cache_memory is not None:
        share = int(settings.kv_cache_memory * _GIB)
        if device.type == "cpu" and share > (free := free_host_bytes()):
            raise StartError(
                f"--kv-cache-memory is {settings.kv_cache_memory:g}, and {free / _GIB:.2f} GiB of memory are free"
            )
        count = share // block_bytes
    elif device.type == "cuda":
        count = _free_cuda_bytes(device, settings.gpu_memory_utilization) // own_bytes
    else:
        # Besides its own states, a sequence may leave states behind for the prefix cache.
        num_states = sum(not group.block_size for group in shapes[0].groups)
        most = settings.max_num_seqs * (needed + num_states)
        count = min(free_host_bytes() // _CPU_SHARE // block_bytes, most)
    count = min(ranks.gather_numbers(count))
    if count < (least := blocks_for(least_model_len)):
        fitting = bisect_right(range(1, least_model_len), count, key=blocks_for)
        raise StartError(_too_little(device, fitting, block_bytes, least_model_len, max(count, 0), least))
    return count


def blocks_of(num_tokens: int, shape: CacheShape, sliding_window: int, chunk: int) -> int:
    """Blocks of one sequence. chunk: tokens of the largest step."""
    groups = [(group.block_size, group.window) for group in shape.groups] or [(shape.block_size, sliding_window)]
    with_keys = [(size, window) for size, window in groups if size]
    numbers = ((-(-num_tokens // size), (window + chunk - 3) // size + 2, window) for size, window in with_keys)
    num_states = len(groups) - len(with_keys)
    return num_states + sum(min(whole, recent) if window else whole for whole, recent, window in numbers)


def _too_little(
    device: torch.device, fitting: int, block_bytes: int, max_model_len: int, count: int, needed: int
) -> str:
    flags = "--gpu-memory-utilization or --kv-cache-memory" if device.type == "cuda" else "--kv-cache-memory"
    less = f" to at most {fitting}" if fitting else ""
    return (
        f"the KV cache on {device.type} has room for {count} blocks ({count * block_bytes / _GIB:.3g} GiB), and "
        f"one sequence of {max_model_len} tokens needs {needed} ({needed * block_bytes / _GIB:.3g} GiB); "
        f"raise {flags}, or lower --max-model-len{less}"
    )


def _free_cuda_bytes(device: torch.device, utilization: float) -> int:
    """Bytes left for the KV cache: this process's share, minus its peak use and the use of other processes."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(utilization * total) - others - torch.cuda.max_memory_allocated(device)


def free_host_bytes() -> int:
    """Available bytes of the machine and of its control group, whichever are fewer."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + _reclaimable_bytes()))


def _reclaimable_bytes() -> int:
    """Bytes of inactive file pages, such as of weight files. Linux can reclaim them, although a control group counts
    them as used."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def give_freed_memory_back() -> None:
    """Make glibc return freed memory to the operating system.

    After a free of n bytes (up to 32 MiB), glibc keeps all later freed allocations of at most n bytes. After packing
    1.5 billion weights, glibc kept 235 MiB besides 1,360 MiB in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has `malloc_trim`
    if trim is not None:
        trim(0)
