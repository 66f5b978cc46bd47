"""Blocks arrive where they are sent, in the order that a step promises."""

import pytest
import torch

from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.session.step import BlockMapping, SchedulerOutput

SHAPE = CacheShape(num_layers=2, block_size=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)


def test_keys_that_are_also_the_values_take_half_the_memory() -> None:
    latents = CacheShape(2, 3, 1, 18, torch.float32, kv_parts=1)
    assert latents.block_bytes == 2 * 3 * 18 * 4
    assert latents.allocate(5, torch.device("cpu")).shape == (5, 2, 1, 3, 1, 18)


@pytest.fixture
def engine() -> CacheEngine:
    engine = CacheEngine(SHAPE, 6, 4, torch.device("cpu"))
    for block in range(6):
        engine.device_blocks[block] = block
    for block in range(4):
        engine.host_blocks[block] = 100 + block
    return engine


def contents(engine: CacheEngine) -> tuple[list[float], list[float]]:
    assert (engine.device_blocks.flatten(1) == engine.device_blocks.flatten(1)[:, :1]).all()
    return engine.device_blocks.flatten(1)[:, 0].tolist(), engine.host_blocks.flatten(1)[:, 0].tolist()


def test_a_step_swaps_out_then_in_then_copies(engine: CacheEngine) -> None:
    engine.move(
        SchedulerOutput(
            1,
            1,
            # Device block 2 makes room for host block 3, whose content then is copied on.
            blocks_to_swap_out=BlockMapping((2, 5), (0, 1)),
            blocks_to_swap_in=BlockMapping((3, 0), (2, 4)),
            blocks_to_copy=BlockMapping((2, 2), (0, 1)),
        )
    )
    assert contents(engine) == ([103, 103, 103, 3, 2, 5], [2, 5, 102, 103])


def test_measuring_bandwidth_leaves_a_number(engine: CacheEngine) -> None:
    assert engine.measure_swap_bandwidth() > 0


def test_there_is_no_bandwidth_without_a_host_pool() -> None:
    assert CacheEngine(SHAPE, 2, 0, torch.device("cpu")).measure_swap_bandwidth() == 0


def test_block_bytes_are_those_of_the_pool(engine: CacheEngine) -> None:
    assert engine.device_blocks.nbytes == 6 * SHAPE.block_bytes


def test_a_block_of_all_layers_is_one_piece_of_memory_so_that_swapping_it_is_one_transfer(engine: CacheEngine) -> None:
    for pool in (engine.device_blocks, engine.host_blocks):
        assert pool[0].is_contiguous()
        assert pool[0].nbytes == SHAPE.block_bytes
