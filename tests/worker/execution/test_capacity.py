"""The cache gets a share of what memory there is, and a worker without room for a sequence does not start."""

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from kernels import reference
from kernels.backends import ops_for
from kernels.ops import Ops
from pagewire_common.start_error import StartError
from worker_service.execution.cache.cache_engine import CacheShape
from worker_service.execution.cache.layer_groups import LayerGroup
from worker_service.execution.startup import capacity
from worker_service.execution.startup.capacity import (
    check_room_for_weights,
    count_device_blocks,
    give_freed_memory_back,
)
from worker_service.execution.worker import load_worker
from worker_service.models.layer_needs import LayerKeys
from worker_service.parallel.ranks import ALONE, Ranks
from worker_service.settings import WorkerSettings

Make = Callable[..., Path]
CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=1, block_size=1, num_kv_heads=1, head_dim=5, dtype=torch.uint8)
assert SHAPE.block_bytes == 10


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 4,000 bytes available, in a control group to be filled in."""
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=4000))
    return tmp_path


class FirstOfTwo(Ranks):
    """Beside a rank that answers with these numbers: the bytes of its part of a block, then its count of blocks."""

    def __init__(self, *others: int) -> None:
        super().__init__(0, 2)
        self._others = list(others)

    def gather_numbers(self, number: int) -> list[int]:
        return [number, self._others.pop(0)]


def count(
    max_model_len: int = 1,
    sliding_window: int = 0,
    ranks: Ranks = ALONE,
    least_model_len: int | None = None,
    **settings: Any,
) -> int:
    given = WorkerSettings(**{"max_num_seqs": 256, **settings})
    return count_device_blocks(CPU, [SHAPE], max_model_len, sliding_window, given, ranks, least_model_len)


def gib(num_bytes: int) -> float:
    return num_bytes / 2**30


def test_a_cpu_gives_a_quarter_of_what_is_available(cgroup: Path) -> None:
    assert count() == 100


def test_no_more_blocks_than_could_be_used(cgroup: Path) -> None:
    assert count(max_num_seqs=7) == 7


@pytest.mark.parametrize(("limit", "expected"), [("1000", 20), ("max", 100), ("1000000", 100), ("100", 0)])
def test_a_control_groups_limit_counts(limit: str, expected: int, cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(limit + "\n")
    (cgroup / "memory.current").write_text("200\n")
    if expected:
        assert count() == expected
    else:
        with pytest.raises(StartError, match="room for 0 blocks"):
            count()


def test_files_that_were_read_do_not_count_as_used(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "memory.current").write_text("900\n")
    (cgroup / "memory.stat").write_text("anon 200\ninactive_file 700\nactive_file 0\n")
    assert count() == 20


def test_the_operator_may_say_how_much_or_how_many(cgroup: Path) -> None:
    assert count(kv_cache_memory=gib(3999)) == 399
    assert count(kv_cache_memory=gib(3999), num_gpu_blocks_override=3) == 3


def test_more_than_is_free_is_refused_with_both_numbers(cgroup: Path) -> None:
    with pytest.raises(StartError, match=r"--kv-cache-memory is 2, and 0\.00 GiB of memory are free"):
        count(kv_cache_memory=2)


@pytest.mark.parametrize(
    ("max_model_len", "settings", "sentence"),
    [
        (101, {}, r"room for 100 blocks \(9\.31e-07 GiB\), and one sequence of 101 tokens needs 101 \(9\.41e-07 GiB\)"),
        (41, {"kv_cache_memory": gib(400)}, r"room for 40 blocks .*lower --max-model-len to at most 40$"),
        (2, {"kv_cache_memory": gib(9)}, r"room for 0 blocks .*raise --kv-cache-memory, or lower --max-model-len$"),
    ],
)
def test_a_cache_too_small_for_one_sequence_is_refused(
    max_model_len: int, settings: dict[str, Any], sentence: str, cgroup: Path
) -> None:
    with pytest.raises(StartError, match=sentence):
        count(max_model_len, **settings)


def test_the_longest_sequence_that_fits_has_blocks_in_every_group_of_layers(cgroup: Path) -> None:
    """Of 9 tokens, 5 blocks without a window and 3 with one: the window and a chunk touch 3 at most."""
    needs = LayerKeys(1, 5)
    groups = LayerGroup((0,), 0, 2, needs, 20), LayerGroup((1, 2), 3, 1, needs, 10)
    shape = replace(SHAPE, groups=groups)
    settings = WorkerSettings(kv_cache_memory=gib(7 * shape.block_bytes), max_num_batched_tokens=1, max_num_seqs=1)
    with pytest.raises(StartError, match=r"room for 7 blocks .*9 tokens needs 8 .*at most 8$"):
        count_device_blocks(CPU, [shape], 9, 0, settings)
    assert count_device_blocks(CPU, [shape], 8, 0, settings) == 7


def test_a_cache_may_be_too_small_for_texts_that_positions_are_only_scaled_for(
    cgroup: Path, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the longest text is then the longest that fits, unless that is less than without scaling."""
    assert count(400, least_model_len=90) == 100
    with pytest.raises(StartError, match="one sequence of 110 tokens needs 110"):
        count(400, least_model_len=110)
    monkeypatch.undo()  # of the machine's memory
    path = make_checkpoint(rope_parameters={"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4})
    block_bytes = 3 * 2 * 16 * 2 * 10 * 4
    settings: dict[str, Any] = {"model": str(path), "device": "cpu", "dtype": "float32", "block_size": 16}
    settings["kv_cache_memory"] = gib(block_bytes * 20)
    assert load_worker(WorkerSettings(**settings)).limits.max_model_len == 320
    assert load_worker(WorkerSettings(**settings, max_model_len=200)).limits.max_model_len == 200
    assert load_worker(WorkerSettings(**settings | {"kv_cache_memory": None})).limits.max_model_len == 1024
    with pytest.raises(StartError, match="one sequence of 1000 tokens"):
        load_worker(WorkerSettings(**settings, max_model_len=1000))
    with pytest.raises(StartError, match="--max-model-len is 1025; the model's limit is 1024"):
        load_worker(WorkerSettings(**settings, max_model_len=1025))


def test_a_number_of_blocks_is_the_operators_own_choice(cgroup: Path) -> None:
    assert count(100, num_gpu_blocks_override=3) == 3


def test_a_window_and_a_chunk_must_fit_however_long_a_sequence_may_be(cgroup: Path) -> None:
    whole = count(kv_cache_memory=1000 / 2**30)
    enough = (8 + 4 - 3) // SHAPE.block_size + 2
    assert enough <= whole
    assert count(10**6, sliding_window=8, kv_cache_memory=1000 / 2**30, max_num_batched_tokens=4) == whole
    with pytest.raises(StartError, match="one sequence of 1000000 tokens needs"):
        count(10**6, kv_cache_memory=1000 / 2**30, max_num_batched_tokens=4)


def test_weights_beyond_memory_are_refused_before_they_are_allocated(cgroup: Path, tiny_checkpoint: Path) -> None:
    check_room_for_weights(CPU, torch.float32, [1000, 1500])  # and 1,500 more while the larger is packed
    with pytest.raises(StartError, match=r"the weights take 0\.00 GiB, and cpu has 0\.00 GiB of memory free"):
        check_room_for_weights(CPU, torch.float32, [1001, 1500])
    with pytest.raises(StartError, match="the weights take"):
        load_worker(WorkerSettings(model=str(tiny_checkpoint), device="cpu", cache=cgroup / "cache"))


@pytest.mark.parametrize("backend", [reference, ops_for(CPU)], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_room_for_weights_is_room_for_the_logits_head_as_it_is_held(
    backend: Ops, dtype: torch.dtype, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 where the CPU has no product of 16 bits whose sums are not rounded."""
    monkeypatch.setattr(capacity, "ops_for", lambda _: backend)
    product = backend.pack(weight := torch.zeros(32, 16, dtype=dtype), wide=True)
    held = [*vars(product).values(), *(cell.cell_contents for cell in getattr(product, "__closure__", ()) or ())]
    (head,) = [tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor)]
    others = 4000 - weight.nbytes - head
    check_room_for_weights(CPU, dtype, [weight.nbytes, *[8] * (others // 8)])
    with pytest.raises(StartError, match="the weights take"):
        check_room_for_weights(CPU, dtype, [weight.nbytes, *[8] * (others // 8), 8])


def test_ranks_share_the_memory_of_a_machine_and_have_as_many_blocks_as_the_poorest(cgroup: Path) -> None:
    assert count(ranks=FirstOfTwo(15, 1000)) == 4000 // 4 // (10 + 15)
    assert count(ranks=FirstOfTwo(15, 7)) == 7
    assert count(ranks=FirstOfTwo(10, 1000), kv_cache_memory=gib(1000)) == 50
    with pytest.raises(StartError, match="has room for 7 blocks"):
        count(8, ranks=FirstOfTwo(15, 7))
    check_room_for_weights(CPU, torch.float32, [1000], FirstOfTwo(2000))
    with pytest.raises(StartError, match="the weights take"):
        check_room_for_weights(CPU, torch.float32, [1000], FirstOfTwo(2001))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library gives freed memory back, or never does")
def test_memory_that_was_freed_among_what_is_used_goes_back_to_the_system() -> None:
    blocks = [bytearray(100_000) for _ in range(2_000)]  # each small enough to lie among others
    last = blocks.pop()
    before = psutil.Process().memory_info().rss
    del blocks
    give_freed_memory_back()
    assert psutil.Process().memory_info().rss < before - 150_000_000
    assert not any(last)
