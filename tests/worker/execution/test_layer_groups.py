"""Layers with and without a window have block tables of their own, and no token changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_decode_graphs import FakeGraphs, with_fake_graphs
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from structlog.testing import capture_logs
from worker_helpers import LIMITS

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire_common.start_error import StartError
from scheduler_service.core import (
    PreemptionMode,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    WaitingQueue,
)
from scheduler_service.core.config import LayerGroup
from scheduler_service.wire.codec import decode_model_output, decode_worker_info, encode_scheduler_output
from worker_service.errors import InvalidStepError
from worker_service.execution.cache.cache_engine import CacheShape
from worker_service.execution.cache.layer_groups import group_layers, page_bytes, unused_share
from worker_service.execution.worker import load_worker
from worker_service.models.causal_model import GroupedCache
from worker_service.models.layer_needs import LayerKeys, LayerStates, State
from worker_service.serving.codec.answers import encode_model_output, encode_worker_info
from worker_service.serving.codec.steps import decode_scheduler_output
from worker_service.session.session import Session
from worker_service.session.step import LayerLimits, Limits
from worker_service.settings import WorkerSettings

WINDOW = 8
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: Mapping[str, dict[str, Any]] = {
    "native": {"model_type": "gemma3_text", "num_hidden_layers": 3, "layer_types": KINDS, "sliding_window": WINDOW},
    "borrowed": {"model_type": "exaone4", "num_hidden_layers": 3, "layer_types": KINDS, "sliding_window": WINDOW},
    "heads of two sizes": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "layer_types": [*KINDS, "full_attention"],
        "sliding_window": WINDOW,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 131,
    },
    "chunks": {
        "model_type": "llama4_text",
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0, 1],
        "moe_layers": [],
        "intermediate_size_mlp": 90,
        "floor_scale": 5,
        "attn_scale": 0.4,
    },
}
# One layer without a window and two with one: 8 and 4 tokens of a block have the same bytes.
GROUPED = replace(LIMITS, block_size=8, layer_groups=(LayerLimits(8, 0), LayerLimits(4, WINDOW)))
CHUNKED = replace(GROUPED, layer_groups=(LayerLimits(8, 0), LayerLimits(4, WINDOW, chunked=True)))


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(**MODELS[request.param])


def keys(windows: Sequence[int | None], head_dim: int = 8) -> list[LayerKeys]:
    return [LayerKeys(2, head_dim, window=window) for window in windows]


@pytest.fixture
def grouped(checkpoint: Path) -> Limits:
    return CHUNKED if "llama4" in checkpoint.name else GROUPED


def scheduler_of(limits: Any, **sizes: Any) -> Scheduler:
    config: dict[str, Any] = {
        "block_size": limits.block_size,
        "layer_groups": tuple(LayerGroup(*group) for group in limits.layer_groups),
        "num_device_blocks": limits.num_device_blocks,
        "num_host_blocks": limits.num_host_blocks,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_model_len": limits.max_model_len,
        "watermark": 0.0,
    }
    return Scheduler(SchedulerConfig(**config | sizes), WaitingQueue())


def serve(scheduler: Scheduler, worker: SteppedWorker, groups: Sequence[SequenceGroup]) -> None:
    for group in groups:
        scheduler.add_request(group)
    while scheduler.has_work:
        output = scheduler.schedule()
        step = decode_scheduler_output(encode_scheduler_output(output, epoch=1), worker.limits)
        answer = worker.execute(step)
        scheduler.update_from_output(output, decode_model_output(encode_model_output(1, step.step_id, answer)))
        scheduler.blocks.check()


def outputs(group: SequenceGroup) -> list[list[int]]:
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in group.sequences]


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_tokens_match_transformers_through_preemption_and_from_the_prefix_cache(
    checkpoint: Path, grouped: Limits, mode: PreemptionMode, replays: bool
) -> None:
    """Four contexts of up to 57 tokens need up to 8 and 6 blocks at a time each, of a pool of 17. CUDA graphs have a
    block table for each group."""
    limits = replace(grouped, num_device_blocks=17, num_host_blocks=40)
    scheduler, record = scheduler_of(limits, preemption_mode=mode), FakeGraphs()
    runner = load_runner(checkpoint, limits=limits)
    worker = SteppedWorker(with_fake_graphs(runner, limits, record=record) if replays else runner, limits)
    oracle = Oracle(checkpoint)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[10:], PROMPT[:30]]
    groups = [SequenceGroup(str(n), prompt, SamplingParams(max_tokens=20)) for n, prompt in enumerate(prompts)]
    serve(scheduler, worker, groups)
    for group, prompt in zip(groups, prompts, strict=True):
        assert outputs(group) == [oracle.greedy(prompt, 20)]
    assert scheduler.num_preemptions[mode] > 0
    again = SequenceGroup("again", [*PROMPT, 5, 6], SamplingParams(max_tokens=9))
    scheduler.reset_prefix_cache()
    serve(scheduler, worker, [SequenceGroup("first", PROMPT, SamplingParams(max_tokens=1)), again])
    assert again.history.num_cached_tokens == len(PROMPT) // 8 * 8
    assert outputs(again) == [oracle.greedy([*PROMPT, 5, 6], 9)]
    assert bool(record.replayed) == replays


def test_outputs_of_one_prompt_share_its_blocks_in_every_group(checkpoint: Path, grouped: Limits) -> None:
    limits = replace(grouped, num_device_blocks=40)
    scheduler, worker = scheduler_of(limits), SteppedWorker(load_runner(checkpoint, limits=limits), limits)
    group = SequenceGroup("r", PROMPT, SamplingParams(max_tokens=12, n=3))
    serve(scheduler, worker, [group])
    assert outputs(group) == 3 * [Oracle(checkpoint).greedy(PROMPT, 12)]


@pytest.mark.parametrize("checkpoint", ["native", "borrowed", "chunks"], indirect=True)
@pytest.mark.parametrize(
    ("flag", "step_tokens", "groups"),
    [(False, 16, [(8, 0), (4, WINDOW)]), (True, 16, []), (False, 7, [])],
    ids=["groups", "refused by a flag", "steps shorter than a block"],
)
def test_a_worker_states_its_groups_and_counts_the_blocks_that_a_sequence_needs(
    checkpoint: Path, flag: bool, step_tokens: int, groups: list[tuple[int, int]]
) -> None:
    settings = WorkerSettings(
        model=str(checkpoint),
        device="cpu",
        block_size=4,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=step_tokens,
        disable_hybrid_kv_cache_manager=flag,
    )
    with capture_logs() as logs:
        worker = load_worker(settings)
    assert ("layers with a window keep whole contexts" in [line["event"] for line in logs]) is (not groups)
    info = decode_worker_info(encode_worker_info(worker.info, worker.limits, epoch=0))
    assert [(group.block_size, group.window) for group in info.layer_groups] == groups
    assert info.block_size == (8 if groups else 4)
    # 16 blocks of 8 tokens, and those of 4 that the window and a chunk touch; or 32 blocks of 4 tokens.
    assert info.num_device_blocks == (16 + (WINDOW + 16 - 3) // 4 + 2 if groups else 32)


@pytest.mark.parametrize("checkpoint", ["heads of two sizes"], indirect=True)
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager: .* needs groups of layers"),
        ({"max_num_batched_tokens": 7}, "--max-num-batched-tokens is 7; it must be at least 8"),
    ],
)
def test_layers_of_different_sizes_need_groups(checkpoint: Path, flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        load_worker(WorkerSettings(model=str(checkpoint), device="cpu", block_size=4, max_model_len=128, **flags))


def test_a_step_with_tables_of_other_groups_is_refused() -> None:
    scheduler = scheduler_of(replace(GROUPED, layer_groups=()))
    scheduler.add_request(SequenceGroup("r", PROMPT, SamplingParams(max_tokens=1)))
    message = encode_scheduler_output(scheduler.schedule(), epoch=1)
    with pytest.raises(InvalidStepError, match="further_tables: 1 block tables of a sequence; the model has 2 groups"):
        decode_scheduler_output(message, GROUPED)
    message.new_sequences[0].further_tables.add(block_ids=[1, 2])
    message.block_table_updates.add(layer_group=2)
    with pytest.raises(InvalidStepError, match="layer_group: 2; the model has 2 groups"):
        decode_scheduler_output(message, GROUPED)


@pytest.mark.parametrize(
    ("num_whole", "num_recent", "sizes"),
    [
        (12, 12, (16, 16)),  # gpt-oss 20B
        (3, 15, (80, 16)),  # Gemma 3 270M
        (4, 22, (96, 16)),  # Gemma 3 1B
        (5, 29, (96, 16)),  # Gemma 3 4B
        (8, 40, (80, 16)),  # Gemma 3 12B
        (10, 52, (80, 16)),  # Gemma 3 27B
        (8, 24, (48, 16)),  # OLMo 3 7B
        (5, 1, (16, 80)),
    ],
)
def test_blocks_of_all_groups_have_nearly_the_same_bytes(
    num_whole: int, num_recent: int, sizes: tuple[int, int]
) -> None:
    groups = group_layers(keys([None] * num_whole + [512] * num_recent), 16, 8192, torch.float32)
    assert tuple(group.block_size for group in groups) == sizes
    assert min(group.num_bytes for group in groups) >= 0.9 * page_bytes(groups)


def test_layers_of_one_kind_are_no_groups_and_a_window_of_the_longest_sequence_is_none() -> None:
    for windows, max_model_len in (([512, 512], 8192), ([None, 512], 512)):
        assert group_layers(keys(windows), 16, max_model_len, torch.float32) == ()


def test_groups_that_save_nothing_are_none() -> None:
    for windows, block_size in (([20] * 31 + [None], 256), ([20] + [None] * 31, 16)):
        assert group_layers(keys(windows), block_size, 8192, torch.float32) == ()
    assert group_layers(keys([20] * 31 + [None]), 16, 8192, torch.float32)


def test_layers_of_a_block_do_not_overlap_and_fill_it() -> None:
    shape = CacheShape(3, 4, 2, 8, torch.float32, group_layers(keys([6, None, 6]), 4, 100, torch.float32))
    blocks = shape.allocate(2, torch.device("cpu"))
    cache = shape.view(blocks)
    assert isinstance(cache, GroupedCache)
    assert cache.block_sizes == [8, 4]
    layers = [layer.blocks for layer in cache.layers]
    whole = blocks.view(torch.float32)
    blocks.zero_()
    for number in (0, 2):
        layers[number].add_(1 + number)
    assert sorted(set(whole.flatten().tolist())) == [1, 3]
    blocks.zero_()
    layers[1].add_(1)
    assert (whole == 1).all()


def test_layers_with_keys_of_other_sizes_have_groups_of_their_own() -> None:
    """A layer with one head of 512 elements has half the bytes of two layers with two heads of 256 each."""
    layers = [LayerKeys(1, 512), *keys([None, None], head_dim=256), *keys([8, 8], head_dim=256)]
    groups = group_layers(layers, 16, 8192, torch.bfloat16)
    assert [(group.layers, group.block_size, group.window) for group in groups] == [
        ((0,), 32, 0), ((1, 2), 16, 0), ((3, 4), 16, 8)
    ]  # fmt: skip


STATES: Mapping[str, tuple[int, LayerKeys, int, LayerStates, list[int], int]] = {
    # numbers and needs of layers with keys and with states; layers of each group with states, tokens of a block
    "Qwen3-Next 80B": (
        12, LayerKeys(2, 256), 36, LayerStates((State((8192, 3), False), State((32, 128, 128), True))), [6] * 6, 528
    ),
    "Granite 4 tiny": (
        4, LayerKeys(4, 128), 36, LayerStates((State((3328, 3), False), State((48, 64, 128), True))), [6] * 6, 1168
    ),
    "LFM2 350M": (6, LayerKeys(8, 64), 10, LayerStates((State((1024, 2), False),)), [10], 16),
}  # fmt: skip


@pytest.mark.parametrize("model", STATES)
def test_states_are_divided_so_that_few_bytes_of_a_sequence_are_unused(model: str) -> None:
    num_keys, layer_keys, num_states, layer_states, sizes, tokens = STATES[model]
    groups = group_layers([layer_keys] * num_keys + [layer_states] * num_states, 16, 2**18, torch.bfloat16)
    first, *others = groups
    assert (first.block_size, [len(group.layers) for group in others]) == (tokens, sizes)
    assert {group.block_size for group in others} == {0}
    assert max(group.num_bytes for group in groups) <= page_bytes(groups)
    assert unused_share(groups, 8192) < 0.1


def test_states_are_divided_further_if_a_block_would_have_more_tokens_than_a_step() -> None:
    states = [LayerStates((State((3328, 3), False), State((48, 64, 128), True)))] * 9
    without_limit, limited = (
        group_layers([LayerKeys(4, 128), *states], 16, 2304, torch.bfloat16, max_span=most)[0].block_size
        for most in (None, 2048)
    )
    assert limited <= 2048 < without_limit


def test_states_of_a_block_are_views_of_their_types_that_do_not_overlap() -> None:
    layer = LayerStates((State((5, 3), False), State((2, 3, 4), True)))
    groups = group_layers([*keys([None, None]), layer, layer], 4, 100, torch.bfloat16)
    shape = CacheShape(4, 4, 2, 8, torch.bfloat16, groups, state_dtype=torch.bfloat16)
    cache = shape.view(blocks := shape.allocate(3, torch.device("cpu")))
    assert isinstance(cache, GroupedCache)
    assert cache.block_sizes == [4, 0]
    assert shape.span == 4
    blocks.zero_()
    views = [state for layer in cache.layers[2:] for state in layer.blocks]
    assert [(tuple(view.shape), view.dtype) for view in views] == 2 * [
        ((3, 5, 3), torch.bfloat16), ((3, 2, 3, 4), torch.float32)
    ]  # fmt: skip
    for number, view in enumerate(views):
        view.fill_(1 + number)
    assert [set(view.flatten().tolist()) for view in views] == [{1.0}, {2.0}, {3.0}, {4.0}]


def test_a_network_of_states_alone_has_one_group_and_a_span_of_the_block_size() -> None:
    layers = [LayerStates((State((64, 3), False), State((1, 64, 16), True)))] * 24
    groups = group_layers(layers, 16, 2**20, torch.float32)
    assert [(len(group.layers), group.block_size) for group in groups] == [(24, 0)]
    assert CacheShape(24, 16, 0, 0, torch.float32, groups).span == 16


WITH_STATES = replace(LIMITS, block_size=8, layer_groups=(LayerLimits(8, 0), LayerLimits(0, 0)))


def test_tables_of_states_have_one_block(message_of: Callable[..., Any]) -> None:
    with pytest.raises(InvalidStepError, match="block_ids: 2 blocks in group 1 of layers, whose states are one block"):
        decode_scheduler_output(message_of([0, 1], [2, 3]), WITH_STATES)
    message = message_of([0, 1], [2])
    decode_scheduler_output(message, WITH_STATES)
    message.block_table_updates.add(sequence_id=1, start=1, block_ids=[3], layer_group=1)
    with pytest.raises(InvalidStepError, match="block_table_updates: 1 blocks from entry 1 on in group 1 of layers"):
        decode_scheduler_output(message, WITH_STATES)


def test_two_sequences_of_a_step_do_not_share_states(message_of: Callable[..., Any]) -> None:
    message = message_of([0, 1], [2])
    message.new_sequences.append(message.new_sequences[0])
    message.new_sequences[1].sequence_id = 2
    message.sequence_ids.append(2)
    session = Session(1, WITH_STATES)
    with pytest.raises(InvalidStepError, match="sequences 1 and 2 have states in block 2"):
        session.apply(decode_scheduler_output(message, WITH_STATES))


@pytest.fixture
def message_of() -> Callable[..., Any]:
    """A step with sequence 1, and its block tables in two groups."""

    def make(*tables: list[int]) -> pb.SchedulerOutput:
        message = pb.SchedulerOutput(epoch=1, step_id=1, sequence_ids=[1])
        new = message.new_sequences.add(sequence_id=1, token_ids=[1], num_prompt_tokens=1, block_ids=tables[0])
        for table in tables[1:]:
            new.further_tables.add(block_ids=table)
        return message

    return make
