"""The native Llama against transformers in float32, over every way that a sequence can be cut into steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepped_worker import PROMPT, Oracle, SteppedWorker, load_runner
from worker_helpers import new_sequence, tokens

from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.session.step import BlockMapping, BlockTableUpdate

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "no groups": {"num_key_value_heads": 6},
    "derived head size": {"head_dim": None},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> ModelRunner:
    return load_runner(tiny_checkpoint)


@pytest.fixture
def worker(runner: ModelRunner) -> SteppedWorker:
    runner.cache_engine.device_blocks.fill_(float("nan"))
    runner.cache_engine.host_blocks.fill_(float("nan"))
    return SteppedWorker(runner)


@pytest.fixture(scope="module")
def greedy(tiny_checkpoint: Path) -> list[int]:
    return Oracle(tiny_checkpoint).greedy(PROMPT, 12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers_in_float32(variant: str, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**VARIANTS[variant])
    expected = Oracle(path).logprobs(PROMPT)[:-1]
    found = SteppedWorker(load_runner(path)).prompt_logprobs([len(PROMPT)])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk_lens", [[36], [1] * 36, [5, 1, 17, 13], [16, 16, 4]])
def test_chunks_compute_what_the_whole_computes(
    chunk_lens: list[int], worker: SteppedWorker, tiny_checkpoint: Path
) -> None:
    expected = Oracle(tiny_checkpoint).logprobs(PROMPT)[:-1]
    torch.testing.assert_close(worker.prompt_logprobs(chunk_lens), expected, atol=2e-5, rtol=1e-4)


def test_greedy_tokens_match_transformers(worker: SteppedWorker, greedy: list[int]) -> None:
    first = worker.step((1, 37, True), new_sequences=(new_sequence(1, PROMPT, range(13)),)).token_ids
    assert first + worker.generate(1, 11) == greedy


def test_a_batch_of_chunks_and_decodes_computes_what_each_does_alone(worker: SteppedWorker, greedy: list[int]) -> None:
    new = new_sequence(1, PROMPT, range(13))
    assert worker.step((1, 37, True), new_sequences=(new,)).token_ids == greedy[:1]
    late = [new_sequence(2, PROMPT, range(20, 33)), new_sequence(3, PROMPT[:5], range(40, 50))]
    answer = worker.step((2, 20, False), (1, 1, True), (3, 5, True), new_sequences=tuple(late))
    assert answer.token_ids[0] == greedy[1]
    answer = worker.step((3, 1, True), (1, 1, True), (2, 17, True))
    assert answer.token_ids[1:] == [greedy[2], greedy[0]]
    for number in range(3, 10):
        assert worker.step((2, 1, True), (3, 1, True), (1, 1, True)).token_ids[::2] == [
            greedy[number - 2],
            greedy[number],
        ]


def test_recompute_after_preemption_continues_the_same(worker: SteppedWorker, greedy: list[int]) -> None:
    worker.step((1, 37, True), new_sequences=(new_sequence(1, PROMPT, range(13)),))
    worker.generate(1, 4)
    worker.step(preempted=(1,))
    back = new_sequence(1, PROMPT + greedy[:5], range(30, 43), num_prompt_tokens=37)
    assert worker.step((1, 42, True), new_sequences=(back,)).token_ids == greedy[5:6]
    assert worker.generate(1, 6) == greedy[6:]


def test_swapping_out_and_in_continues_the_same(worker: SteppedWorker, greedy: list[int]) -> None:
    prompt = PROMPT[:20]
    worker.step((1, 20, True), new_sequences=(new_sequence(1, prompt, range(7)), new_sequence(2, PROMPT, range(7, 20))))
    expected = worker.generate(1, 4)

    worker.step(finished=(1,))
    worker.step((3, 20, True), new_sequences=(new_sequence(3, prompt, range(7)),))
    worker.step(blocks_to_swap_out=BlockMapping((0, 1, 2, 3, 4), (7, 3, 5, 1, 0)))
    worker.runner.cache_engine.device_blocks[:7] = float("nan")
    found = worker.step(
        (3, 1, True),
        blocks_to_swap_in=BlockMapping((7, 3, 5, 1, 0), (60, 50, 61, 51, 62)),
        block_table_updates=(BlockTableUpdate(3, 0, tokens([60, 50, 61, 51, 62, 52])),),
    ).token_ids
    assert found + worker.generate(3, 3) == expected


def test_a_computed_prefix_is_not_computed_again(worker: SteppedWorker, greedy: list[int]) -> None:
    worker.step((1, 37, True), new_sequences=(new_sequence(1, PROMPT, range(13)),))
    shared = new_sequence(2, PROMPT, [*range(9), 40, 41, 42], num_computed_tokens=36)
    assert worker.step((2, 1, True), new_sequences=(shared,)).token_ids == greedy[:1]


def test_prompt_logprobs_are_reported_once_for_each_prompt_token_but_the_first(worker: SteppedWorker) -> None:
    new = new_sequence(1, PROMPT, range(13), prompt_logprobs=0)
    (first,) = worker.step((1, 30, False), new_sequences=(new,)).prompt_logprobs
    (second,) = worker.step((1, 7, True)).prompt_logprobs
    assert first.token_ids + second.token_ids == PROMPT[1:]
    assert not worker.step((1, 1, True)).prompt_logprobs


def test_a_poisoned_sequence_fails_alone(worker: SteppedWorker, greedy: list[int]) -> None:
    new = (new_sequence(1, PROMPT, range(13)), new_sequence(2, PROMPT, range(20, 33)))
    worker.step((1, 37, True), (2, 37, True), new_sequences=new)
    worker.runner.cache_engine.device_blocks[20] = float("nan")
    answer = worker.step((2, 1, True), (1, 1, True))
    assert answer.failed_sequence_ids == [2]
    assert answer.token_ids == [0, greedy[1]]


def test_logits_are_made_only_for_rows_that_sample(worker: SteppedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    model = worker.runner.model
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: rows.append(len(hidden)) or compute(hidden))
    worker.step((1, 20, False), new_sequences=(new_sequence(1, PROMPT, range(13)),))
    worker.step((1, 17, True))
    assert rows == [0, 1]
