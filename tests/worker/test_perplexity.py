"""The default model in bfloat16 understands real text as well as transformers does in float32."""

import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker_helpers import tokens

from kernels.ops import ops_for
from pagewire_common.settings import load_settings
from worker_service.model_store import find_model
from worker_service.session import ScheduledChunk, SequenceState
from worker_service.settings import WorkerSettings
from worker_service.step import SamplingParams, SchedulerOutput
from worker_service.worker import load_worker

TOPICS = ("types", "import", "formatstrings", "compound")
"""Of Python's own manual, which comes with every Python."""
WINDOW = 512
CHUNK_LENS = [300, 100, 1, 1, 1, 5, 64, 40]
"""A prompt cut into steps as a scheduler may; the last token predicts nothing here."""
SHORT_CHUNKS = [8] * 64
"""With so few rows int8 weights meet activations of 12 bits, with more those of bfloat16."""


@pytest.fixture(scope="module")
def model_directory() -> Path:
    return find_model("default", load_settings(WorkerSettings, "tests", []).cache.expanduser()).path


@pytest.fixture(scope="module")
def windows(model_directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    return [tokenizer.encode(topics[topic])[:WINDOW] for topic in TOPICS]


@pytest.fixture(scope="module")
def their_loss(model_directory: Path, windows: list[list[int]]) -> float:
    assert all(len(window) == WINDOW for window in windows)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    batch = torch.tensor(windows)
    with torch.inference_mode():
        loss = float(model(batch, labels=batch).loss)
    assert 1.0 < math.exp(loss) < 40.0  # it is text that the model understands
    return loss


def test_perplexity_in_bfloat16_is_within_half_a_percent(
    model_directory: Path, windows: list[list[int]], their_loss: float
) -> None:
    assert abs(math.exp(our_loss(model_directory, windows, CHUNK_LENS) - their_loss) - 1) < 0.005


@pytest.mark.parametrize("chunk_lens", [CHUNK_LENS, SHORT_CHUNKS], ids=["long", "short"])
def test_perplexity_with_int8_weights_is_within_one_percent(
    chunk_lens: list[int], model_directory: Path, windows: list[list[int]], their_loss: float
) -> None:
    if ops_for(torch.device("cpu")).pack_int8(torch.ones(2, 2, dtype=torch.bfloat16)) is None:
        pytest.skip("this machine has no bf16 dot products, which int8 weights need")
    assert abs(math.exp(our_loss(model_directory, windows, chunk_lens, quantization="int8") - their_loss) - 1) < 0.01


def our_loss(path: Path, windows: list[list[int]], chunk_lens: list[int], **settings: Any) -> float:
    """The mean of the negative log-probabilities of all tokens but the first of each window."""
    worker = load_worker(
        WorkerSettings(model=str(path), device="cpu", dtype="bfloat16", num_device_blocks=2 * WINDOW, **settings)
    )
    losses: list[float] = []
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
            losses += [] if report is None else [-logprob for logprob in report.logprobs]
    assert len(losses) == len(windows) * (WINDOW - 1)
    return sum(losses) / len(losses)
