"""Layers with states give transformers' tokens, through whatever a scheduler does."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_sweep import compare
from stepped_worker import DEVICE, PROMPT, Oracle, SteppedWorker, load_runner, make_nan
from test_layer_groups import outputs, scheduler_of, serve
from tiny_networks import randomize, save_tokenizer, tiny_network
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from worker_helpers import LIMITS, new_sequence

from pagewire_common.start_error import StartError
from scheduler_service.core import PreemptionMode, SamplingParams, SequenceGroup
from scheduler_service.wire.codec import decode_worker_info
from worker_service.execution.worker import load_worker
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.borrowed import states
from worker_service.models.borrowed.step_states import StepStates
from worker_service.models.config.text_part import text_part
from worker_service.serving.codec.answers import encode_worker_info
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import LayerLimits
from worker_service.settings import WorkerSettings

DELTA, MAMBA, BOTH, LIGHTNING, TOKEN_BY_TOKEN = "olmo_hybrid", "mamba", "falcon_h1", "minimax", "zaya"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {}
    for name in (DELTA, MAMBA, BOTH, LIGHTNING, TOKEN_BY_TOKEN):
        found[name] = tmp_path_factory.mktemp(name)
        tiny_network(name).save_pretrained(found[name])
        save_tokenizer(found[name])
    return found


@pytest.mark.parametrize("name", [DELTA, MAMBA, BOTH, LIGHTNING, TOKEN_BY_TOKEN])
def test_tokens_match_transformers_in_chunks_and_batches_after_recomputation_and_swapping(
    name: str, checkpoints: Mapping[str, Path]
) -> None:
    oracle = Oracle(checkpoints[name])
    assert compare(checkpoints[name], oracle, oracle.logprobs(PROMPT)) == ""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="products of a GPU depend on the number of rows")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(DELTA, torch.bfloat16), (MAMBA, torch.bfloat16), (BOTH, torch.bfloat16), (BOTH, torch.float32)],
)
def test_log_probabilities_have_the_same_bits_for_any_chunks(
    name: str, dtype: torch.dtype, checkpoints: Mapping[str, Path]
) -> None:
    runner = load_runner(checkpoints[name], dtype=dtype)
    expected = SteppedWorker(runner).prompt_logprobs([36])
    for chunk_lens in ([5, 1, 17, 13], [1] * 36):
        make_nan(runner.cache_engine.device_blocks)
        assert torch.equal(SteppedWorker(runner).prompt_logprobs(chunk_lens), expected)


GROUPED = replace(LIMITS, block_size=8, layer_groups=(LayerLimits(8, 0), LayerLimits(0, 0), LayerLimits(0, 0)))
"""States of two layers are larger than 8 tokens of two layers with keys, so each has a group."""


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_tokens_match_transformers_through_preemption_and_from_the_prefix_cache(
    checkpoints: Mapping[str, Path], mode: PreemptionMode
) -> None:
    limits = replace(GROUPED, num_device_blocks=24, num_host_blocks=40)
    scheduler = scheduler_of(limits, preemption_mode=mode, max_num_batched_tokens=16)
    worker = SteppedWorker(load_runner(checkpoints[DELTA], limits=limits), limits)
    oracle = Oracle(checkpoints[DELTA])
    prompts = [PROMPT, PROMPT[::-1], PROMPT[10:], PROMPT[:30]]
    groups = [SequenceGroup(str(n), prompt, SamplingParams(max_tokens=20)) for n, prompt in enumerate(prompts)]
    serve(scheduler, worker, groups)
    for group, prompt in zip(groups, prompts, strict=True):
        assert outputs(group) == [oracle.greedy(prompt, 20)]
    assert scheduler.num_preemptions[mode] > 0
    scheduler.reset_prefix_cache()
    again = SequenceGroup("again", [*PROMPT, 5, 6], SamplingParams(max_tokens=9))
    for group in (SequenceGroup("first", PROMPT, SamplingParams(max_tokens=1)), again):
        serve(scheduler, worker, [group])
    assert (again.history.num_cached_tokens or 0) > 0
    assert outputs(again) == [oracle.greedy([*PROMPT, 5, 6], 9)]


def test_outputs_of_one_prompt_have_states_of_their_own(checkpoints: Mapping[str, Path]) -> None:
    scheduler = scheduler_of(GROUPED, max_num_batched_tokens=16)
    worker = SteppedWorker(load_runner(checkpoints[DELTA], limits=GROUPED), GROUPED)
    group = SequenceGroup("r", PROMPT, SamplingParams(max_tokens=12, n=3))
    serve(scheduler, worker, [group])
    assert outputs(group) == 3 * [Oracle(checkpoints[DELTA]).greedy(PROMPT, 12)]


def test_adapters_have_no_place_at_weights_that_the_code_multiplies_itself(checkpoints: Mapping[str, Path]) -> None:
    model = load_runner(checkpoints[MAMBA]).model
    places = {name.rpartition(".")[2] for name in model.allocate_adapters(1, 4)}
    assert places == {"in_proj", "x_proj", "out_proj"}  # and not dt_proj


def test_a_text_network_reads_a_checkpoint_with_an_encoder_of_pictures(tmp_path: Path) -> None:
    text = tiny_network("qwen3_5_text").config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config={**vision, "num_position_embeddings": 16})
    network = Qwen3_5ForConditionalGeneration(config)
    randomize(network)
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    worker = SteppedWorker(load_runner(tmp_path))
    expected = Oracle(tmp_path).greedy(PROMPT, 6)
    first = worker.step((1, len(PROMPT), True), new_sequences=(new_sequence(1, PROMPT, range(13)),)).token_ids
    assert [*first, *worker.generate(1, 5)] == expected
    json = Checkpoint(tmp_path).config
    with pytest.raises(ValueError, match=r"it says audio_config = .*, which is not supported in a model qwen3_5"):
        text_part({**json, "audio_config": {"depth": 1}})
    with pytest.raises(ValueError, match="tie_word_embeddings is True for the network, and False in text_config"):
        text_part({**json, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match="text_config describes a model llama, not qwen3_5_text"):
        text_part({**json, "text_config": {"model_type": "llama"}})


class SlowForms:
    """Forms that allow every token, whose masks are late in the given steps."""

    def __init__(self, late_steps: Set[int]) -> None:
        self._late_steps, self._step = late_steps, 0

    def begin(self, formed: Sequence[ScheduledChunk]) -> "SlowForms":
        self._step += 1
        self._ids = {chunk.sequence.sequence_id for chunk in formed}
        return self

    def of(self, sequences: Sequence[SequenceState]) -> npt.NDArray[np.uint8]:
        return np.full((len(sequences), -(-LIMITS.vocabulary_size // 32) * 4), 255, np.uint8)

    def late(self) -> Set[int]:
        return self._ids if self._step in self._late_steps else frozenset()


def test_options_of_transformers_functions_that_no_kernel_knows_are_refused_by_name() -> None:
    def causal_conv1d_fn(*_: object, **__: object) -> None: ...

    convolve = states._dispatching(causal_conv1d_fn, states._convolve)
    assert convolve(torch.ones(1, 2, 3), dilation=2) is None, "outside of a step, the function is transformers' own"
    with (
        states.within_states(StepStates([])),
        pytest.raises(ValueError, match="its code passes dilation to causal_conv1d_fn, which is not supported"),
    ):
        convolve(torch.ones(1, 2, 3), torch.ones(2, 4), None, seq_idx=None, dilation=2)


def test_late_masks_do_not_advance_states_twice(checkpoints: Mapping[str, Path]) -> None:
    """A sequence beside the late one goes on. A prompt's last chunk is late once, and a decode twice."""
    runner: Any = load_runner(checkpoints[DELTA])
    runner._forms = SlowForms({2, 4, 5})
    oracle, worker = Oracle(checkpoints[DELTA]), SteppedWorker(runner)
    new = (new_sequence(1, PROMPT, range(13), form="any"), new_sequence(2, PROMPT[:20], range(20, 33)))
    worker.step((1, 30, False), (2, 19, False), new_sequences=new)
    steps = [worker.step((1, 7, True), (2, 1, True)), *(worker.step((1, 1, True), (2, 1, True)) for _ in range(6))]
    assert [step.num_tokens for step in steps] == [[0, 1], [], [0, 1], [0, 1], [], [], []]
    numbers = [iter(step.token_ids) for step in steps]
    found = [next(tokens) for step, tokens in zip(steps, numbers, strict=True) if step.num_tokens[:1] != [0]]
    assert found == oracle.greedy(PROMPT, 4)
    assert [token for tokens in numbers for token in tokens] == oracle.greedy(PROMPT[:20], 7)
    runner._forms = SlowForms({1})
    assert worker.step((1, 1, True)).token_ids == []
    assert worker.step((1, 1, True)).token_ids == oracle.greedy([*PROMPT, *found], 1)


def settings_of(path: Path, **others: Any) -> WorkerSettings:
    sizes: dict[str, Any] = {"block_size": 4, "max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    return WorkerSettings(**{"model": str(path), "device": "cpu"} | sizes | others)


def test_a_worker_states_its_groups_and_counts_a_block_of_each_for_a_sequence(
    checkpoints: Mapping[str, Path],
) -> None:
    worker = load_worker(settings_of(checkpoints[DELTA]))
    info = decode_worker_info(encode_worker_info(worker.info, worker.limits, epoch=0))
    assert [(group.block_size, group.window) for group in info.layer_groups] == [(8, 0), (0, 0), (0, 0)]
    # One sequence's blocks, and room for states in the prefix cache.
    assert (info.block_size, info.num_device_blocks) == (8, 128 // 8 + 2 + 2)
    worker = load_worker(settings_of(checkpoints[MAMBA], max_model_len=10_000))
    assert worker.limits.layer_groups == (LayerLimits(0, 0),)
    assert (worker.limits.block_size, worker.limits.num_device_blocks) == (4, 2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager: .* needs groups of layers"),
        (
            {"max_num_batched_tokens": 7},
            "--max-num-batched-tokens is 7; it must be at least 8, the tokens of a block of",
        ),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
            "--speculative-config .* keeps states, which rejected drafts would have changed",
        ),
    ],
)
def test_settings_that_exclude_states_are_refused(
    settings: dict[str, Any], reason: str, checkpoints: Mapping[str, Path]
) -> None:
    with pytest.raises(StartError, match=reason):
        load_worker(settings_of(checkpoints[DELTA], **settings))
