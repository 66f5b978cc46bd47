"""Networks with experts say the same whatever is computed beside them, though all tokens of a step share the experts.

In float32 and, on a CPU, in bf16, also with quantised weights: to the bit where tokens would hide a difference.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_networks import NATIVE
from stepped_worker import DEVICE, PROMPT, Oracle, SteppedWorker, load_runner
from tiny_networks import randomize, save_tokenizer, tiny_network
from transformers import Llama4Config, Llama4ForConditionalGeneration
from worker_helpers import LIMITS, new_sequence

from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.execution.worker import load_worker
from worker_service.models.layers.linear import Quantization, can_pack
from worker_service.session.session import Session
from worker_service.session.step import SchedulerOutput
from worker_service.settings import WorkerSettings

FAMILIES = [
    "gpt_oss",
    "mixtral, windows",
    "qwen3_moe, not renormalised",
    "qwen3_moe, dense layers between",
    "deepseek_v3, groups",
    "llama4_text, chunks",
]
TYPES: list[tuple[torch.dtype, Quantization]] = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.float32, "fp8"),
    (torch.bfloat16, "fp8"),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "w8a8"),
    (torch.bfloat16, "int4"),
]
COUNT = 12
SAMPLING = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 11, "top_p": 0.9}]
"""Of three sequences of the same prompt."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(**NATIVE[request.param])


@pytest.fixture(params=TYPES, ids=str)
def runner(request: pytest.FixtureRequest, checkpoint: Path) -> ModelRunner:
    dtype, quantization = request.param
    if DEVICE.type != "cpu" and dtype is not torch.float32:
        pytest.skip("bf16 is the same to the bit on CPUs")
    if dtype is torch.bfloat16 and not can_pack(DEVICE, dtype, "int4" if quantization == "none" else quantization):
        pytest.skip("this machine has no such products, or the CPU's kernels are not compiled")
    return load_runner(checkpoint, dtype=dtype, quantization=quantization)


def alone(runner: ModelRunner, number: int) -> list[int]:
    worker = SteppedWorker(runner)
    new = new_sequence(number + 1, PROMPT, range(14), **SAMPLING[number])
    first = worker.step((number + 1, len(PROMPT), True), new_sequences=(new,)).token_ids
    return [*first, *worker.generate(number + 1, COUNT - 1)]


def test_sequences_say_together_and_in_chunks_what_each_says_alone(runner: ModelRunner) -> None:
    """Greedy and drawn ones, which begin in different steps."""
    expected = [alone(runner, number) for number in range(3)]
    assert len({tuple(one) for one in expected}) == 3
    worker = SteppedWorker(runner)
    new = [new_sequence(n + 1, PROMPT, range(14 * n, 14 * n + 14), **SAMPLING[n]) for n in range(3)]
    found: list[list[int]] = [[], [], []]
    worker.step((1, 20, False), new_sequences=(new[0],))
    found[0] += worker.step((1, 17, True), (2, 3, False), new_sequences=(new[1],)).token_ids
    first, second = worker.step((1, 1, True), (2, 34, True), (3, 30, False), new_sequences=(new[2],)).token_ids
    found[0].append(first)
    found[1].append(second)
    for step in range(COUNT):
        rows = [(n + 1, 7 if n == 2 and step == 0 else 1, True) for n in range(3) if len(found[n]) < COUNT]
        for (sequence, _, _), token in zip(rows, worker.step(*rows).token_ids, strict=True):
            found[sequence - 1].append(token)
    assert found == expected


def test_guesses_change_no_token_right_or_wrong(runner: ModelRunner) -> None:
    expected = alone(runner, 1)
    worker = SteppedWorker(runner)
    new = new_sequence(2, PROMPT, range(14), **SAMPLING[1])
    found = list(worker.step((2, len(PROMPT), True), new_sequences=(new,)).token_ids)
    while len(found) < COUNT:
        right = expected[len(found) : len(found) + 2]
        guesses = [right, [*right[:1], 130], [130, 129, 128]][len(found) % 3]
        found += worker.verify({2: guesses}).token_ids
    assert found[:COUNT] == expected


def test_a_config_is_enough_to_try_a_networks_shape(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for name in ("sliding_window", "attention_chunk_size"):  # so large that layers share a block table
        if config.get(name):
            config[name] = 10**6
    (tmp_path / "config.json").write_text(json.dumps(config))
    worker = load_worker(
        WorkerSettings(model=str(tmp_path), device="cpu", load_format="dummy", num_gpu_blocks_override=32)
    )
    new = new_sequence(1, PROMPT, range(4))
    step = SchedulerOutput(1, 1, (new,), (1,), (len(PROMPT),), (True,))
    session = Session(1, replace(LIMITS, block_size=16))
    assert len(worker.runner.execute(step, session.apply(step)).token_ids) == 1


def test_log_probabilities_of_chunks_are_those_of_the_whole_to_the_bit_in_bf16(checkpoint: Path) -> None:
    if DEVICE.type != "cpu" or not can_pack(DEVICE, torch.bfloat16, "int4"):
        pytest.skip("this needs the CPU's compiled kernels")
    runner = load_runner(checkpoint, dtype=torch.bfloat16)
    whole, chunked = (SteppedWorker(runner).prompt_logprobs(lens) for lens in ([36], [5, 1, 17, 13]))
    assert torch.equal(whole, chunked)


def test_llama_4s_text_network_reads_a_checkpoint_with_an_encoder_of_pictures(tmp_path: Path) -> None:
    text = tiny_network("llama4_text").config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16, "image_size": 28}
    network = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision | sizes))
    randomize(network)
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    worker = SteppedWorker(load_runner(tmp_path))
    expected = Oracle(tmp_path).greedy(PROMPT, 6)
    first = worker.step((1, len(PROMPT), True), new_sequences=(new_sequence(1, PROMPT, range(13)),)).token_ids
    assert [*first, *worker.generate(1, 5)] == expected
