"""The worker's KV memory: a pool of blocks on the device, a pool on the host, and copies of blocks. Blocks are known
only by number. Memory is not initialised, so the operating system commits a host block at its first write."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.narrow_cache import stored_size
from kernels.backends import ops_for
from kernels.inputs import upload
from worker_service.session.step import BlockMapping, SchedulerOutput

_MEASURED_BLOCKS = 8


@dataclass(frozen=True)
class CacheShape:
    """Keys and values of `block_size` tokens in all layers. Layout: `kernels.ops`; 8-bit:
    `kernels.attention.narrow_cache`."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        head_bytes = stored_size(self.head_dim, self.dtype) * self.dtype.itemsize
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * head_bytes

    def allocate(self, num_blocks: int, device: torch.device, pinned: bool = False) -> Tensor:
        """A pool of uninitialised blocks, [num_blocks, num_layers, 2, block_size, num_kv_heads, elements of a head]."""
        head = stored_size(self.head_dim, self.dtype)
        shape = (num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, head)
        return torch.empty(shape, dtype=self.dtype, device=device, pin_memory=pinned)


class CacheEngine:
    """The pools of blocks on the device and, for swapped sequences, on the host."""

    def __init__(self, shape: CacheShape, num_device_blocks: int, num_host_blocks: int, device: torch.device) -> None:
        self.device_blocks = shape.allocate(num_device_blocks, device)
        self.host_blocks = shape.allocate(num_host_blocks, torch.device("cpu"), pinned=device.type == "cuda")
        self._ops = ops_for(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def move(self, output: SchedulerOutput) -> None:
        """Swap out, then swap in, then copy: a swap-in may overwrite a block that the same step swaps out.

        On a GPU, moves run on a separate CUDA stream, ordered between earlier and later work."""
        if self._stream is None:
            self._move(output)
            return
        compute = torch.cuda.current_stream(self.device_blocks.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._move(output)
        compute.wait_stream(self._stream)

    def _move(self, output: SchedulerOutput) -> None:
        _move_blocks(self.device_blocks, self.host_blocks, output.blocks_to_swap_out)
        _move_blocks(self.host_blocks, self.device_blocks, output.blocks_to_swap_in)
        if output.blocks_to_copy.sources:
            device = self.device_blocks.device
            self._ops.copy_blocks(
                self.device_blocks,
                upload(output.blocks_to_copy.sources, torch.int64, device),
                upload(output.blocks_to_copy.destinations, torch.int64, device),
            )

    def measure_swap_bandwidth(self) -> int:
        """Bytes a second of swapping blocks out and in again; 0 without a host pool."""
        blocks = tuple(range(min(_MEASURED_BLOCKS, len(self.device_blocks), len(self.host_blocks))))
        if not blocks:
            return 0
        there_and_back = SchedulerOutput(
            epoch=0,
            step_id=0,
            blocks_to_swap_out=BlockMapping(blocks, blocks),
            blocks_to_swap_in=BlockMapping(blocks, blocks),
        )
        # The first swap is not measured: the first access to the pools' memory is slower.
        self.move(there_and_back)
        self._synchronize()
        start = time.perf_counter()
        self.move(there_and_back)
        self._synchronize()
        moved = 2 * len(blocks) * self.host_blocks[0].nbytes
        return round(moved / (time.perf_counter() - start))

    def _synchronize(self) -> None:
        if self.device_blocks.is_cuda:
            torch.cuda.synchronize(self.device_blocks.device)


def _move_blocks(source_pool: Tensor, destination_pool: Tensor, mapping: BlockMapping) -> None:
    """Copy blocks one by one. On a GPU, the copy engine moves each block, because a kernel would occupy
    multiprocessors. For transfers of megabytes, a kernel that reads pinned memory is no faster."""
    for source, destination in zip(mapping.sources, mapping.destinations, strict=True):
        destination_pool[destination].copy_(source_pool[source], non_blocking=True)
