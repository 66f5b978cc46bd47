"""Steps from CUDA graphs are those of kernels launched one by one, and the host does not wait to launch them.

Everything that needs no GPU itself is also held against fakes, which compute anew what was recorded.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from decode_scripts import ROOM, SAMPLING, add_adapter, generate, generate_with_adapters, new_with, verify_guesses
from fake_decode_graphs import FakeGraphs, WithoutPadding, with_fake_graphs
from stepped_worker import DEVICE, PROMPT, SteppedWorker, load_runner, make_nan
from torch import Tensor
from worker_helpers import LIMITS, embeddings_item, new_sequence, state, tokens

from worker_service.execution.cache import shared_prefixes
from worker_service.execution.drafting import proposer_loaders
from worker_service.execution.loaders import generator_loader
from worker_service.execution.steps import decode_graphs
from worker_service.execution.steps.decode_graphs import DecodeGraphs
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.execution.worker import load_worker
from worker_service.models.causal_model import CausalModel
from worker_service.models.layers.linear import Linear
from worker_service.parallel.ranks import Ranks
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import BlockTableUpdate, SchedulerOutput
from worker_service.settings import WorkerSettings

MAX = 4
needs_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
eager = partial(load_runner, graphs=False)
Load = Callable[..., ModelRunner]


@pytest.fixture(params=["fakes", pytest.param("graphs", marks=needs_a_gpu)])
def load(request: pytest.FixtureRequest) -> Load:
    """Of a runner that replays."""
    if request.param == "graphs":
        return load_runner
    return lambda path, **options: with_fake_graphs(eager(path, **options), LIMITS)


def test_graphs_say_what_single_launches_say(tiny_checkpoint: Path, load: Load) -> None:
    expected = generate(SteppedWorker(eager(tiny_checkpoint)))
    found = generate(SteppedWorker(load(tiny_checkpoint)))
    assert found == expected
    assert len({token for step in found for token in step}) > 20


def test_embeddings_in_place_of_tokens_are_launched_one_by_one(tiny_checkpoint: Path) -> None:
    """Graphs read token ids alone. They go on behind the embeddings."""
    prompt, item = [0, 0, 0, 5], embeddings_item(torch.randn(3, 48), 0)
    runner, record = eager(tiny_checkpoint), FakeGraphs()
    found = []
    for one in (runner, with_fake_graphs(runner, LIMITS, record=record)):
        worker, record.replayed[:] = SteppedWorker(one), []
        new = (new_sequence(1, prompt, range(4), items=(item,)),)
        found.append([*worker.step((1, 4, True), new_sequences=new).token_ids])
        assert not record.replayed
        found[-1] += worker.generate(1, 5)
    assert found[0] == found[1]
    assert len(record.replayed) == 5


def test_graphs_apply_the_adapters_that_are_in_the_slots_when_they_are_replayed(
    tiny_checkpoint: Path, load: Load
) -> None:
    """Of several ranks, beside the base, one loaded anew between replays, and more of them than slots."""
    expected = generate_with_adapters(SteppedWorker(eager(tiny_checkpoint, room=ROOM)))
    assert generate_with_adapters(SteppedWorker(load(tiny_checkpoint, room=ROOM))) == expected
    assert len({tuple(said) for said in expected.values()}) == len(expected)


def test_a_step_of_the_base_alone_launches_no_kernel_of_adapters(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = with_fake_graphs(eager(tiny_checkpoint, room=ROOM), LIMITS)
    add_adapter(runner, "a", rank=3, seed=1)
    worker = SteppedWorker(runner)
    for number, adapter in ((1, "a"), (2, "")):
        worker.step((number, 9, True), new_sequences=(new_with(adapter, number, PROMPT[:9]),))
    launched = []
    add_lora = Linear.add_lora
    monkeypatch.setattr(Linear, "add_lora", lambda *args: launched.append(len(args[2])) or add_lora(*args))
    worker.step((2, 1, True), (1, 1, True))
    assert launched
    launched.clear()
    worker.step((2, 1, True))
    assert not launched


HEADS_OF_TWO_SIZES = {
    "model_type": "gemma4_text",
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 6,
    "head_dim": 12,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
}
"""Their layers form two groups."""
WITH_STATES = {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}


@pytest.mark.parametrize(
    "family",
    [{}, {"model_type": "mistral", "sliding_window": 6}, HEADS_OF_TWO_SIZES],
    ids=["llama", "a window", "groups of layers"],
)
@pytest.mark.parametrize("seed", range(3))
def test_guesses_are_verified_as_by_single_launches(
    family: dict[str, object], seed: int, make_checkpoint: Callable[..., Path], load: Load
) -> None:
    """As many of each sequence as come, from none to the most; some have adapters and some report log-probabilities."""
    path = make_checkpoint(**family)
    expected = verify_guesses(SteppedWorker(eager(path, room=ROOM)), Random(seed), MAX)
    found = verify_guesses(SteppedWorker(load(path, room=ROOM)), Random(seed), MAX)
    assert found.gained == expected.gained
    assert found.without_guesses == expected.without_guesses
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
    for number, said in found.without_guesses.items():
        together = [token_id for step in found.gained for token_id in step[number]]
        assert together == said[: len(together)]
    assert 10 < found.num_right < found.num_guessed


def test_rows_behind_a_window_may_be_anything(make_checkpoint: Callable[..., Path], load: Load) -> None:
    """Their blocks may belong to other sequences by now, of which the oldest row of a step sees none."""
    path = make_checkpoint("mistral", sliding_window=6)
    answers = []
    for runner in (eager(path), load(path)):
        worker = SteppedWorker(runner)
        (first,) = worker.step((1, 20, True), new_sequences=(new_sequence(1, PROMPT[:20], range(8)),)).token_ids
        make_nan(runner.cache_engine.device_blocks[:3])
        worker.step(block_table_updates=(BlockTableUpdate(1, 0, tokens([40, 41, 42, *range(3, 8)])),))
        answers.append([first, *worker.verify({1: [5, 6, 7]}).token_ids, *worker.generate(1, 2)])
    assert answers[0] == answers[1]


@pytest.fixture
def fakes() -> FakeGraphs:
    return FakeGraphs()


def test_chunks_of_prompts_are_replayed_beside_decodes_as_far_as_there_are_rows(
    tiny_checkpoint: Path, fakes: FakeGraphs
) -> None:
    worker = SteppedWorker(with_fake_graphs(eager(tiny_checkpoint), LIMITS, max_num_rows=16, record=fakes))
    new = new_sequence(1, PROMPT, range(16)), new_sequence(2, PROMPT[:30], range(16, 30))
    worker.step((1, len(PROMPT), True), (2, 5, False), new_sequences=new)
    assert not fakes.replayed
    worker.step((1, 1, True), (2, 15, False))
    assert fakes.replayed == [16]
    worker.step((1, 1, True), (2, 10, True))
    assert fakes.replayed == [16, 16]
    worker.step((1, 1, True), (2, 1, True))
    assert fakes.replayed == [16, 16, 2]


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize(
    "family",
    [{"head_dim": 12}, {"head_dim": 12, "model_type": "mistral", "sliding_window": 6}, HEADS_OF_TWO_SIZES, WITH_STATES],
    ids=["llama", "a window", "groups of layers", "states"],
)
def test_prompts_in_any_chunks_beside_decodes_say_what_single_launches_say(
    family: dict[str, object], cache_dtype: torch.dtype | None, make_checkpoint: Callable[..., Path], load: Load
) -> None:
    """With adapters, whose prompts report log-probabilities, and without."""
    path = make_checkpoint(**family)
    answers = []
    for runner in (one(path, room=ROOM, cache_dtype=cache_dtype) for one in (eager, load)):
        add_adapter(runner, "a", rank=3, seed=1)
        worker = SteppedWorker(runner)
        first = new_with("a", 1, PROMPT[:20], prompt_logprobs=2), new_with("", 2, PROMPT[5:30], logprobs=1)
        steps = [
            worker.step((1, 9, False), (2, 25, True), new_sequences=first),
            worker.step((2, 1, True), (1, 10, False)),
            worker.step((2, 1, True), (1, 1, True), (3, 30, True), new_sequences=(new_with("a", 3, PROMPT[7:]),)),
            *(worker.step((2, 1, True), (1, 1, True), (3, 1, True)) for _ in range(3)),
        ]
        answers.append(steps)
    for expected, found in zip(*answers, strict=True):
        assert found.token_ids == expected.token_ids
        for reported in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(found, reported), getattr(expected, reported), strict=True)
            for one, other in pairs:
                assert one.token_ids == other.token_ids
                torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)


def test_what_fits_is_bounded_by_rows_and_by_what_rows_of_one_sequence_read_again(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = eager(tiny_checkpoint)
    model, cache = WithoutPadding(runner.model), runner.cache_engine.device_blocks
    bytes_of_a_token = 2 * 2 * 10 * 4  # keys and values of two heads of 10 in float32
    monkeypatch.setattr(decode_graphs, "_MAX_READ_AGAIN", 1000 * bytes_of_a_token)
    capture = partial(
        DecodeGraphs, cast(CausalModel, model), max_num_rows=64, max_model_len=LIMITS.max_model_len, record=FakeGraphs()
    )
    fits = capture(cache).fit
    assert fits([_chunk(1)] * 64)
    assert fits([_chunk(10)] * 6 + [_chunk(4)])
    assert not fits([_chunk(10)] * 6 + [_chunk(5)]), "65 rows"
    assert fits([_chunk(3, stop=501)]), "contexts of 499 and 500 tokens beside that of 501"
    assert not fits([_chunk(3, stop=502)])
    assert fits([_chunk(45, stop=45)])
    assert not fits([_chunk(46, stop=46)])
    assert fits([_chunk(1, stop=10**6)])
    of_a_rank = capture(cache[..., :1, :])
    assert not of_a_rank.fit([_chunk(3, stop=502)]), "whose heads are fewer than those of another"


def test_what_rows_share_is_not_read_again(
    tiny_checkpoint: Path, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tokens of a question behind 99 of a prompt, of which the first 96 are attended to in parts for all."""
    runner = eager(tiny_checkpoint)
    monkeypatch.setattr(decode_graphs, "_MAX_READ_AGAIN", 100 * 2 * 2 * 10 * 4)
    monkeypatch.setattr(decode_graphs, "_MIN_SAVED", 1)
    for module in (decode_graphs, shared_prefixes):
        monkeypatch.setattr(module, "PART_KEYS", 16)
    model = cast(CausalModel, WithoutPadding(runner.model))
    graphs = DecodeGraphs(model, runner.cache_engine.device_blocks, 16, LIMITS.max_model_len, record=FakeGraphs())
    assert graphs.fit([_chunk(8, stop=107)])
    assert not graphs.fit([_chunk(4, stop=107)]), "rows that are too few to share"


def _chunk(num_tokens: int, stop: int = 10) -> ScheduledChunk:
    return ScheduledChunk(state(PROMPT), stop - num_tokens, stop, True)


def test_a_draft_model_has_graphs_without_adapters(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def capture(*arguments: Any, has_adapters: bool = False) -> None:
        asked.append(has_adapters)

    monkeypatch.setattr(generator_loader, "capture", capture)
    monkeypatch.setattr(proposer_loaders, "capture", capture)
    model = str(tiny_checkpoint)
    config = json.dumps({"method": "draft_model", "model": model, "num_speculative_tokens": 3})
    settings = {
        "model": model,
        "device": "cpu",
        "num_gpu_blocks_override": 64,
        "cache": tmp_path,
    }
    load_worker(WorkerSettings(**settings, max_loras=2, speculative_config=config))
    load_worker(WorkerSettings(**settings))
    assert asked == [True, False, False]


def test_the_kernels_of_gpus_leave_padding_rows_alone(make_checkpoint: Callable[..., Path], interpreted: None) -> None:
    """A replay stores the same keys and values as single launches, in two groups of layers. The steps have prompts,
    guesses, adapters and decodes."""
    two_layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    runner = eager(make_checkpoint(**HEADS_OF_TWO_SIZES | two_layers), room=ROOM)
    cache, blocks = runner.cache_engine.cache, runner.cache_engine.device_blocks
    fakes = FakeGraphs()
    graphs = DecodeGraphs(runner.model, cache, 8, LIMITS.max_model_len, has_adapters=True, record=fakes)
    answers, caches = [], []
    for one in (runner, ModelRunner(runner.model, runner.cache_engine, graphs, adapters=runner.adapters)):
        make_nan(blocks)
        add_adapter(one, "a", rank=3, seed=1)
        worker = SteppedWorker(one)
        new = new_with("a", 1, PROMPT[:4]), new_with("", 2, PROMPT[:3])
        steps = [worker.step((1, 4, True), (2, 3, True), new_sequences=new)]
        steps += worker.verify({2: [9, 8], 1: [7]}), worker.step((2, 1, True), (1, 1, True)), worker.verify({2: [6, 5]})
        answers.append([step.token_ids for step in steps])
        caches.append(blocks.view(torch.float32).clone())
    assert answers[0] == answers[1]
    assert fakes.replayed == [8, 8, 2, 4], "seven rows, five, two and three"
    torch.testing.assert_close(*caches, equal_nan=True)


class _OneOverNccl(Ranks):
    """A single rank that nevertheless runs the sum over ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


@needs_a_gpu
def test_graphs_hold_the_sums_of_ranks(tiny_checkpoint: Path) -> None:
    expected = generate(SteppedWorker(eager(tiny_checkpoint)))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert generate(SteppedWorker(load_runner(tiny_checkpoint, ranks=_OneOverNccl(0, 1)))) == expected
    finally:
        dist.destroy_process_group()


@needs_a_gpu
@pytest.mark.parametrize("adapter", ["", "a"])
def test_a_steady_decode_is_launched_without_waiting_for_the_gpu(adapter: str, tiny_checkpoint: Path) -> None:
    worker = SteppedWorker(load_runner(tiny_checkpoint, room=ROOM))
    add_adapter(worker.runner, "a", rank=3, seed=1)
    for number in range(1, 4):
        new = new_with(adapter, number, PROMPT, **SAMPLING[number - 1])
        worker.step((number, len(PROMPT), True), new_sequences=(new,))
    for _ in range(2):
        worker.step((1, 1, True), (2, 1, True), (3, 1, True))
    session, before = worker.session, None
    for step_id in range(worker.step_id + 1, worker.step_id + 4):
        output = SchedulerOutput(1, step_id, (), (1, 2, 3), (1, 1, 1), (True, True, True))
        torch.cuda.set_sync_debug_mode("error")
        try:
            chunks = session.apply(output)
            running = worker.runner.launch(output, chunks, before)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        session.advance(chunks)
        before = running
    assert before is not None
    assert len(before.finish().token_ids) == 3
