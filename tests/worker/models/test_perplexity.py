"""The default model in bfloat16 and in fewer bits says of real text what transformers says in float32, or nearly."""

import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker_helpers import tokens

from pagewire_common.settings import load_settings
from worker_service.execution.worker import load_worker
from worker_service.loading.model_store import find_model
from worker_service.models.layers.linear import can_pack
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import SamplingParams, SchedulerOutput
from worker_service.settings import WorkerSettings

TOPICS = ("types", "import", "formatstrings", "compound")
"""Topics of Python's own manual, which every Python contains. Tests of bfloat16 read one window of this text, tests of
8-bit products two."""
WINDOW = 512
CHUNK_LENS = [300, 100, 1, 1, 1, 5, 64, 40]
"""A prompt cut into steps as a scheduler may; the last token predicts nothing here."""
SHORT_CHUNKS = [8] * 64
"""With so few rows int8 weights are widened as they are multiplied, with more before."""
HAS_INT8 = can_pack(torch.device("cpu"), torch.bfloat16, "int8")
HAS_INT4 = can_pack(torch.device("cpu"), torch.bfloat16, "int4")
needs_int4 = pytest.mark.skipif(not HAS_INT4, reason="the CPU's kernels are not compiled")
needs_int8 = pytest.mark.skipif(not HAS_INT8, reason="this machine has no bf16 dot products, which int8 weights need")


@pytest.fixture(scope="module")
def model_directory() -> Path:
    return find_model("default", load_settings(WorkerSettings, "tests", []).cache.expanduser()).path


@pytest.fixture(scope="module")
def windows(model_directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    return [tokenizer.encode(topics[topic])[:WINDOW] for topic in (TOPICS if HAS_INT8 else TOPICS[:2])]


@pytest.fixture(scope="module")
def exact(model_directory: Path, windows: list[list[int]]) -> Tensor:
    """The log-probabilities of all tokens but the first of each window, one after the other."""
    logprobs = their_logprobs(model_directory, windows, torch.float32)
    assert 1.0 < perplexity(logprobs) < 40.0  # it is text that the model understands
    return logprobs


def test_perplexity_in_bfloat16_is_within_half_a_percent(
    model_directory: Path, windows: list[list[int]], exact: Tensor
) -> None:
    ours = our_logprobs(model_directory, windows[:1], CHUNK_LENS)
    assert abs(perplexity(ours) / perplexity(exact[: len(ours)]) - 1) < 0.005


@needs_int8
@pytest.mark.parametrize("chunk_lens", [CHUNK_LENS, SHORT_CHUNKS], ids=["long", "short"])
def test_perplexity_with_int8_weights_is_within_one_percent(
    chunk_lens: list[int], model_directory: Path, windows: list[list[int]], exact: Tensor
) -> None:
    ours = our_logprobs(model_directory, windows[:2], chunk_lens, quantization="int8")
    assert abs(perplexity(ours) / perplexity(exact[: len(ours)]) - 1) < 0.01


@needs_int8
def test_int8_weights_are_at_most_a_fifth_further_from_float32_than_transformers_in_bfloat16(
    model_directory: Path, windows: list[list[int]], exact: Tensor
) -> None:
    theirs = their_logprobs(model_directory, windows, torch.bfloat16)
    ours = our_logprobs(model_directory, windows, CHUNK_LENS, quantization="int8")
    assert (ours - exact).abs().mean() <= 1.2 * (theirs - exact).abs().mean()


@needs_int4
@pytest.mark.parametrize("scheme", ["int4", "w8a8"])
def test_perplexity_with_inputs_of_8_bits_is_within_one_percent(
    scheme: str, model_directory: Path, windows: list[list[int]], exact: Tensor
) -> None:
    """The weights come from 4 bits, so that what is rounded is mostly the inputs of products."""
    ours = our_logprobs(model_directory, windows[:2], CHUNK_LENS, quantization=scheme)
    assert abs(perplexity(ours) / perplexity(exact[: len(ours)]) - 1) < 0.01


def perplexity(logprobs: Tensor) -> float:
    return math.exp(-float(logprobs.mean()))


def their_logprobs(path: Path, windows: list[list[int]], dtype: torch.dtype) -> Tensor:
    assert all(len(window) == WINDOW for window in windows)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    found = []
    for window in windows:
        with torch.inference_mode():
            logprobs = model(torch.tensor([window])).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, torch.tensor(window[1:])[:, None]).squeeze(1))
    return torch.cat(found)


def our_logprobs(path: Path, windows: list[list[int]], chunk_lens: list[int], **settings: Any) -> Tensor:
    worker = load_worker(
        WorkerSettings(model=str(path), device="cpu", dtype="bfloat16", num_gpu_blocks_override=2 * WINDOW, **settings)
    )
    logprobs: list[float] = []
    for window in windows:
        sequence = SequenceState(
            sequence_id=1,
            token_ids=tokens(window),
            num_prompt_tokens=WINDOW,
            num_computed_tokens=0,
            block_ids=tokens(range(WINDOW)),
            sampling=SamplingParams(prompt_logprobs=0),
        )
        start = 0
        for length in chunk_lens:
            chunk = ScheduledChunk(sequence, start=start, stop=start + length, samples=False)
            (report,) = worker.runner.execute(SchedulerOutput(epoch=0, step_id=0), [chunk]).prompt_logprobs or (None,)
            start += length
            logprobs += [] if report is None else report.logprobs
    assert len(logprobs) == len(windows) * (WINDOW - 1)
    return torch.tensor(logprobs)
