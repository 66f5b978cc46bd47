"""A cache in 8 bits: the same tokens whatever happens, near those of a cache as wide as the weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prompt_scores import prompt_logprobs, worker_settings
from stepped_worker import DEVICE, PROMPT, SteppedWorker, load_runner, make_nan
from worker_helpers import new_sequence, tokens

from kernels import backends
from kernels.float8 import FLOAT8
from pagewire_common.start_error import StartError
from worker_service.execution.startup.network import Network
from worker_service.execution.worker import load_worker
from worker_service.parallel.ranks import ALONE
from worker_service.session.step import BlockMapping, BlockTableUpdate

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels of GPUs have no cache in 8 bits")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["int8", "e4m3"])
def cache_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """Of e4m3 no kernels but those of GPUs and eager torch have caches."""
    if request.param == "int8":
        yield torch.int8
        return
    monkeypatch.setattr(backends, "_BACKENDS", {})
    backends.ops_for.cache_clear()
    yield FLOAT8
    backends.ops_for.cache_clear()


def narrow_worker(path: Path, dtype: torch.dtype, cache_dtype: torch.dtype) -> SteppedWorker:
    return SteppedWorker(load_runner(path, dtype=dtype, cache_dtype=cache_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_the_same_through_chunks_batches_preemption_and_swapping(
    dtype: torch.dtype, cache_dtype: torch.dtype, tiny_checkpoint: Path
) -> None:
    alone = narrow_worker(tiny_checkpoint, dtype, cache_dtype)
    expected = list(alone.step((1, len(PROMPT), True), new_sequences=(new_sequence(1, PROMPT, range(20)),)).token_ids)
    expected += alone.generate(1, 13)
    assert len(set(expected)) > 1

    worker = narrow_worker(tiny_checkpoint, dtype, cache_dtype)
    worker.step((1, 30, False), new_sequences=(new_sequence(1, PROMPT, range(13)),))
    late = new_sequence(2, PROMPT[:20], range(20, 26))
    found = [worker.step((1, 7, True), (2, 11, False), new_sequences=(late,)).token_ids[0]]
    found.append(worker.step((2, 9, True), (1, 1, True)).token_ids[1])
    found += (worker.step((1, 1, True), (2, 1, True)).token_ids[0] for _ in range(3))

    worker.step(preempted=(1,))
    back = new_sequence(1, PROMPT + found, range(30, 43), num_prompt_tokens=len(PROMPT))
    found += worker.step((1, len(PROMPT) + len(found), True), new_sequences=(back,)).token_ids
    found += worker.generate(1, 3)

    worker.step(blocks_to_swap_out=BlockMapping(tuple(range(30, 38)), tuple(range(8))))
    make_nan(worker.runner.cache_engine.device_blocks[30:38])
    found += worker.step(
        (1, 1, True),
        blocks_to_swap_in=BlockMapping(tuple(range(8)), tuple(range(50, 58))),
        block_table_updates=(BlockTableUpdate(1, 0, tokens([*range(50, 58), *range(38, 43), 60])),),
    ).token_ids
    found += worker.generate(1, len(expected) - len(found))
    assert found == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_scores_the_same_in_any_chunks_and_nearly_as_with_a_wide_cache(
    dtype: torch.dtype, cache_dtype: torch.dtype, tiny_checkpoint: Path
) -> None:
    whole = narrow_worker(tiny_checkpoint, dtype, cache_dtype).prompt_logprobs([36])
    chunks = narrow_worker(tiny_checkpoint, dtype, cache_dtype).prompt_logprobs([5, 1, 17, 13])
    if cache_dtype is torch.int8 or dtype is torch.float32:  # eager products of bf16 depend on the number of rows
        torch.testing.assert_close(chunks, whole, atol=1e-4, rtol=1e-4)
    wide = SteppedWorker(load_runner(tiny_checkpoint, dtype=dtype)).prompt_logprobs([36])
    assert not torch.equal(whole, wide)
    assert (whole - wide).abs().mean() < (0.02 if cache_dtype is torch.int8 else 0.1) * wide.std()


def test_a_block_takes_half_the_memory_and_another_fingerprint(tiny_checkpoint: Path) -> None:
    plain = load_worker(worker_settings(tiny_checkpoint))
    narrow = load_worker(worker_settings(tiny_checkpoint, kv_cache_dtype="int8"))
    head_dim = plain.runner.model.config.head_dim
    assert narrow.info.block_bytes * 2 * head_dim == plain.info.block_bytes * (head_dim + 4)
    assert narrow.info.model_fingerprint != plain.info.model_fingerprint


def test_a_model_in_transformers_code_has_one_too(make_checkpoint: Callable[..., Path]) -> None:
    model = make_checkpoint(model_type="starcoder2")
    wide = prompt_logprobs(worker_settings(model, dtype="float32"))
    narrow = prompt_logprobs(worker_settings(model, dtype="float32", kv_cache_dtype="int8"))
    assert not torch.equal(narrow, wide)
    assert (narrow - wide).abs().mean() < 0.02 * wide.std()


def open_network(path: Path, kv_cache_dtype: str, device: str) -> Network:
    return Network.open(str(path), worker_settings(path, kv_cache_dtype=kv_cache_dtype), torch.device(device), ALONE)


def test_workers_take_the_types_that_their_devices_have(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kv_cache_dtype, device, capability in (
        ("int8", "cpu", None),
        ("int8", "cuda", (8, 0)),
        ("fp8", "cuda", (8, 9)),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        network = open_network(tiny_checkpoint, kv_cache_dtype, device)
        replace(network, shape=replace(network.shape, head_dim=64)).check()
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
        with pytest.raises(StartError, match=r"fp8 is for GPUs of compute capability 8\.9 or later; int8 is for all"):
            open_network(tiny_checkpoint, "fp8", device).check()


def test_caches_of_other_types_have_other_fingerprints(tiny_checkpoint: Path) -> None:
    found = {
        open_network(tiny_checkpoint, kv_cache_dtype, "cpu").fingerprint() for kv_cache_dtype in ("auto", "int8", "fp8")
    }
    assert len(found) == 3


def test_gpus_refuse_heads_whose_scales_would_lie_between_words(tiny_checkpoint: Path) -> None:
    with pytest.raises(StartError, match="has heads of 10 numbers, which must be a multiple of 4 on a GPU"):
        open_network(tiny_checkpoint, "int8", "cuda").check()
