"""The worker's KV memory: a pool of blocks on the device, a pool on the host, and copies of blocks. Blocks are known
only by number. Memory is not initialised, so the operating system commits a host block at its first write."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.narrow_cache import stored_size
from kernels.backends import ops_for
from kernels.inputs import upload
from worker_service.execution.cache.layer_groups import LayerGroup, page_bytes
from worker_service.models.causal_model import GroupedCache, LayerCache
from worker_service.models.layer_needs import LayerStates
from worker_service.session.step import BlockMapping, SchedulerOutput

_MEASURED_BLOCKS = 8


@dataclass(frozen=True)
class CacheShape:
    """Keys and values of `block_size` tokens in all layers or, with groups, the needs of the layers of one group.
    Layout: `kernels.ops`; 8-bit: `kernels.attention.narrow_cache`."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Type of keys and values."""
    groups: tuple[LayerGroup, ...] = ()
    """The groups of layers, if there are several or if layers have states."""
    kv_parts: int = 2
    """1 if a head's key is also its value (see `kernels.reference`)."""
    state_dtype: torch.dtype = torch.float32
    """The type of states that need not be float32: the network's."""

    @property
    def block_bytes(self) -> int:
        if self.groups:
            return page_bytes(self.groups)
        head = stored_size(self.head_dim, self.dtype)
        return self.num_layers * self.block_size * self.kv_parts * self.num_kv_heads * head * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Tokens in a whole number of each group's blocks."""
        sizes = [group.block_size for group in self.groups if group.block_size]
        return math.lcm(*sizes) if sizes else self.block_size

    def allocate(self, num_blocks: int, device: torch.device, pinned: bool = False) -> Tensor:
        """A pool of uninitialised blocks, [num_blocks, num_layers, kv_parts, block_size, num_kv_heads, elements of a
        head] or, with groups, [num_blocks, bytes of a block] uint8."""
        if self.groups:
            return torch.empty((num_blocks, self.block_bytes), dtype=torch.uint8, device=device, pin_memory=pinned)
        head = stored_size(self.head_dim, self.dtype)
        shape = (num_blocks, self.num_layers, self.kv_parts, self.block_size, self.num_kv_heads, head)
        return torch.empty(shape, dtype=self.dtype, device=device, pin_memory=pinned)

    def view(self, blocks: Tensor) -> Tensor | GroupedCache:
        """The memory of `allocate` as a model reads it."""
        if not self.groups:
            return blocks
        layers: dict[int, LayerCache] = {}
        for number, group in enumerate(self.groups):
            for place, layer in enumerate(group.layers):
                part = blocks[:, place * group.layer_bytes : (place + 1) * group.layer_bytes]
                if isinstance(group.needs, LayerStates):
                    layers[layer] = LayerCache(group.needs.view(part, self.state_dtype), number)
                else:
                    layers[layer] = LayerCache(group.needs.view(part, group.block_size, self.dtype), number)
        return GroupedCache([layers[layer] for layer in sorted(layers)], [group.block_size for group in self.groups])


class CacheEngine:
    """The pools of blocks on the device and, for swapped sequences, on the host."""

    def __init__(self, shape: CacheShape, num_device_blocks: int, num_host_blocks: int, device: torch.device) -> None:
        self.device_blocks = shape.allocate(num_device_blocks, device)
        self.cache = shape.view(self.device_blocks)
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
