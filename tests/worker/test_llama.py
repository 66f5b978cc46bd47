"""The native Llama against transformers in float32, over every way that a sequence can be cut into steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worker_helpers import LIMITS, new_sequence, tokens

from worker_service.cache_engine import CacheEngine, CacheShape
from worker_service.checkpoint import Checkpoint
from worker_service.model_runner import ModelRunner
from worker_service.models.llama import LlamaConfig, LlamaForCausalLM
from worker_service.session import Session
from worker_service.step import BlockMapping, BlockTableUpdate, ModelOutput, NewSequence, SchedulerOutput

PROMPT = [(7 * number * number + 3) % 131 for number in range(37)]
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


def load_runner(path: Path) -> ModelRunner:
    """A runner over a pool that is NaN wherever nothing was stored."""
    checkpoint = Checkpoint(path)
    config = LlamaConfig.from_json(checkpoint.config)
    model = LlamaForCausalLM(config, torch.float32, torch.device("cpu"))
    checkpoint.load_into(model.checkpoint_tensors())
    shape = CacheShape(config.num_layers, LIMITS.block_size, config.num_kv_heads, config.head_dim, torch.float32)
    engine = CacheEngine(shape, LIMITS.num_device_blocks, LIMITS.num_host_blocks, torch.device("cpu"))
    engine.device_blocks.fill_(float("nan"))
    engine.host_blocks.fill_(float("nan"))
    return ModelRunner(model, engine)


class Worker:
    """A session and a runner, stepped by hand."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.session = Session(1, LIMITS)
        self.step_id = 0

    def step(self, *scheduled: tuple[int, int, bool], **output: Any) -> ModelOutput:
        self.step_id += 1
        ids, counts, samples = zip(*scheduled, strict=True) if scheduled else ((), (), ())
        step = SchedulerOutput(
            1, self.step_id, sequence_ids=ids, num_scheduled_tokens=counts, samples=samples, **output
        )
        chunks = self.session.apply(step)
        answer = self.runner.execute(step, chunks)
        self.session.commit(chunks, answer.token_ids)
        return answer

    def generate(self, sequence_id: int, count: int) -> list[int]:
        return [self.step((sequence_id, 1, True)).token_ids[0] for _ in range(count)]


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> ModelRunner:
    return load_runner(tiny_checkpoint)


@pytest.fixture
def worker(runner: ModelRunner) -> Worker:
    runner.cache_engine.device_blocks.fill_(float("nan"))
    runner.cache_engine.host_blocks.fill_(float("nan"))
    return Worker(runner)


def reference_logits(path: Path, token_ids: list[int]) -> Tensor:
    from transformers import LlamaForCausalLM as Reference

    with torch.inference_mode():
        return Reference.from_pretrained(path, dtype=torch.float32)(torch.tensor([token_ids])).logits[0]


@pytest.fixture(scope="module")
def greedy(tiny_checkpoint: Path) -> list[int]:
    """What transformers continues PROMPT with, token by token, without a cache."""
    from transformers import LlamaForCausalLM as Reference

    model = Reference.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    token_ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(12):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(PROMPT) :]


def all_logprobs(worker: Worker, chunk_lens: list[int]) -> Tensor:
    """The log-softmax at every prompt position but the last, [len(PROMPT) - 1, vocabulary_size]."""
    rows: list[list[float]] = []
    new: dict[str, tuple[NewSequence, ...]] = {
        "new_sequences": (new_sequence(1, PROMPT, range(20, 32), prompt_logprobs=131),)
    }
    for chunk_len in chunk_lens:
        (report,) = worker.step((1, chunk_len, False), **new).prompt_logprobs or (None,)
        new = {}
        if report is not None:
            for start in range(0, len(report.token_ids), report.width):
                by_id = sorted(
                    zip(
                        report.token_ids[start + 1 : start + 132], report.logprobs[start + 1 : start + 132], strict=True
                    )
                )
                rows.append([logprob for _, logprob in by_id])
    return torch.tensor(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers_in_float32(variant: str, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**VARIANTS[variant])
    expected = reference_logits(path, PROMPT)[:-1].log_softmax(-1)
    found = all_logprobs(Worker(load_runner(path)), [len(PROMPT)])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk_lens", [[36], [1] * 36, [5, 1, 17, 13], [16, 16, 4]])
def test_chunks_compute_what_the_whole_computes(chunk_lens: list[int], worker: Worker, tiny_checkpoint: Path) -> None:
    expected = reference_logits(tiny_checkpoint, PROMPT)[:-1].log_softmax(-1)
    torch.testing.assert_close(all_logprobs(worker, chunk_lens), expected, atol=2e-5, rtol=1e-4)


def test_greedy_tokens_match_transformers(worker: Worker, greedy: list[int]) -> None:
    first = worker.step((1, 37, True), new_sequences=(new_sequence(1, PROMPT, range(13)),)).token_ids
    assert first + worker.generate(1, 11) == greedy


def test_a_batch_of_chunks_and_decodes_computes_what_each_does_alone(worker: Worker, greedy: list[int]) -> None:
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


def test_recompute_after_preemption_continues_the_same(worker: Worker, greedy: list[int]) -> None:
    worker.step((1, 37, True), new_sequences=(new_sequence(1, PROMPT, range(13)),))
    worker.generate(1, 4)
    worker.step(preempted=(1,))
    back = new_sequence(1, PROMPT + greedy[:5], range(30, 43), num_prompt_tokens=37)
    assert worker.step((1, 42, True), new_sequences=(back,)).token_ids == greedy[5:6]
    assert worker.generate(1, 6) == greedy[6:]


def test_swapping_out_and_in_continues_the_same(worker: Worker, greedy: list[int]) -> None:
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


def test_a_computed_prefix_is_not_computed_again(worker: Worker, greedy: list[int]) -> None:
    worker.step((1, 37, True), new_sequences=(new_sequence(1, PROMPT, range(13)),))
    shared = new_sequence(2, PROMPT, [*range(9), 40, 41, 42], num_computed_tokens=36)
    assert worker.step((2, 1, True), new_sequences=(shared,)).token_ids == greedy[:1]


def test_prompt_logprobs_are_reported_once_for_each_prompt_token_but_the_first(worker: Worker) -> None:
    new = new_sequence(1, PROMPT, range(13), prompt_logprobs=0)
    (first,) = worker.step((1, 30, False), new_sequences=(new,)).prompt_logprobs
    (second,) = worker.step((1, 7, True)).prompt_logprobs
    assert first.token_ids + second.token_ids == PROMPT[1:]
    assert not worker.step((1, 1, True)).prompt_logprobs


def test_a_poisoned_sequence_fails_alone(worker: Worker, greedy: list[int]) -> None:
    new = (new_sequence(1, PROMPT, range(13)), new_sequence(2, PROMPT, range(20, 33)))
    worker.step((1, 37, True), (2, 37, True), new_sequences=new)
    worker.runner.cache_engine.device_blocks[20] = float("nan")
    answer = worker.step((2, 1, True), (1, 1, True))
    assert answer.failed_sequence_ids == [2]
    assert answer.token_ids == [0, greedy[1]]


def test_logits_are_made_only_for_rows_that_sample(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    model = worker.runner.model
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: rows.append(len(hidden)) or compute(hidden))
    worker.step((1, 20, False), new_sequences=(new_sequence(1, PROMPT, range(13)),))
    worker.step((1, 17, True))
    assert rows == [0, 1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"sliding_window": 16}, "sliding window"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"num_key_value_heads": 4}, "cannot share 4"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
    ],
)
def test_networks_that_are_not_supported_are_refused(
    change: dict[str, Any], sentence: str, tiny_checkpoint: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LlamaConfig.from_json(Checkpoint(tiny_checkpoint).config | change)
