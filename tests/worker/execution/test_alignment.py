"""When tokens are said: the times are those of transformers, however the prompt is cut."""

import json
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepped_worker import DEVICE, SteppedWorker, make_nan
from tiny_encoder_decoder import ALIGNMENT_HEADS, GENERATION, SILENT, SPEECH, SPEECH_START, write_whisper
from worker_helpers import tokens

from pagewire_common.model_files.generation_config import GenerationConfig
from pagewire_common.start_error import StartError
from worker_service.errors import InvalidStepError
from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.execution.sampling.alignment import Aligner, first_columns
from worker_service.execution.steps.encoder_decoder_runner import EncoderDecoderRunner
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.registry import build_encoder_decoder, read_config
from worker_service.session.step import Limits, NewSequence, PoolingParams, PoolingType, SamplingParams

LIMITS = Limits(
    block_size=16,
    num_device_blocks=220,
    num_host_blocks=0,
    vocabulary_size=SPEECH["vocab_size"],
    max_model_len=SPEECH["max_target_positions"],
    max_num_batched_tokens=256,
    max_num_seqs=4,
    max_encoder_len=1500,
    max_num_encoder_tokens=1500,
    feature_bytes=80 * 3000 * 4,
    aligns=True,
)
START = [SPEECH_START, SILENT]
TEXT = [(7 * n * n + 3 * n) % 250 for n in range(20)]
FEATURES = np.random.default_rng(3).normal(size=(80, 3000)).astype("<f4")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("models") / "whisper")


@pytest.fixture(scope="module")
def worker(path: Path) -> SteppedWorker:
    files = Checkpoint(path)
    config: Any = read_config(files.config)
    model = build_encoder_decoder(config, torch.float32, DEVICE)
    files.load_into(model.checkpoint_tensors())
    model.pack()
    shape = CacheShape(config.num_layers, LIMITS.block_size, config.num_kv_heads, config.head_dim, torch.float32)
    engine = CacheEngine(shape, LIMITS.num_device_blocks, LIMITS.num_host_blocks, DEVICE)
    make_nan(engine.device_blocks)
    generation = GenerationConfig.read(files.config, files.generation, config.vocabulary_size)
    runner = EncoderDecoderRunner(model, engine, aligner=Aligner.read(generation, config))
    stepped = SteppedWorker(runner, LIMITS)
    whole = NewSequence(
        100, array("q", bytes(8 * 1500)), 1500, 0, tokens(range(94)), SamplingParams(), is_encoder=True,
        features=FEATURES.tobytes(),
    )  # fmt: skip
    stepped.step((100, 1500, False), new_sequences=(whole,))
    return stepped


def expected(path: Path, num_rows: int, num_sound_tokens: int) -> list[float]:
    """What transformers makes of the last tokens, where weights are of the sound alone, as in Whisper's own code."""
    from transformers import WhisperForConditionalGeneration
    from transformers.generation import GenerateEncoderDecoderOutput

    network: Any = WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    prompt = torch.tensor([[*START, *TEXT]])
    with torch.inference_mode():
        found = network(
            input_features=torch.from_numpy(FEATURES.copy())[None], decoder_input_ids=prompt, output_attentions=True
        )
    weights = [of[..., :num_sound_tokens] / of[..., :num_sound_tokens].sum(-1, True) for of in found.cross_attentions]
    times = network._extract_token_timestamps(
        GenerateEncoderDecoderOutput(cross_attentions=[weights], sequences=prompt),
        ALIGNMENT_HEADS,
        num_frames=2 * num_sound_tokens,
        num_input_ids=prompt.shape[1] - num_rows,
    )
    said: list[float] = times[0, prompt.shape[1] - num_rows : -1].tolist()
    return said


numbers = iter(range(1, 100))


def aligned(worker: SteppedWorker, cuts: list[int], num_rows: int, num_sound_tokens: int) -> list[float]:
    number, prompt = next(numbers), [*START, *TEXT]
    pooling = PoolingParams(PoolingType.ALIGNMENT, num_rows, num_sound_tokens=num_sound_tokens)
    params = SamplingParams(pooling=pooling)
    new: Any = {
        "new_sequences": (
            NewSequence(number, tokens(prompt), len(prompt), 0, tokens(range(94, 100)), params, encoder_id=100),
        )
    }
    for start, stop in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        answer = worker.step((number, stop - start, stop == len(prompt)), **new)
        new = {}
        assert bool(answer.vectors) is (stop == len(prompt))
    (vectors,) = answer.vectors
    return (np.frombuffer(vectors.data, "<f4") * 0.02).tolist()


@pytest.mark.parametrize("num_sound_tokens", [1500, 333, 5, 2])
def test_times_are_those_of_transformers(path: Path, worker: SteppedWorker, num_sound_tokens: int) -> None:
    found = aligned(worker, [], len(TEXT) + 1, num_sound_tokens)
    assert found == pytest.approx(expected(path, len(TEXT) + 1, num_sound_tokens), abs=0.0001)
    assert len(set(found)) > 1


def test_times_are_the_same_however_a_prompt_is_cut(worker: SteppedWorker) -> None:
    whole = aligned(worker, [], len(TEXT) + 1, 700)
    assert aligned(worker, [1, 9], len(TEXT) + 1, 700) == whole
    assert aligned(worker, [21], len(TEXT) + 1, 700) == whole


def test_a_prompt_that_was_not_computed_here_from_its_beginning_is_refused(worker: SteppedWorker) -> None:
    params = SamplingParams(pooling=PoolingParams(PoolingType.ALIGNMENT, 3, num_sound_tokens=9))
    new = NewSequence(500, tokens([*START, *TEXT]), 22, 16, tokens(range(94, 100)), params, encoder_id=100)
    with pytest.raises(InvalidStepError, match="sequence 500 is aligned, and its first tokens are missing"):
        worker.step((500, 6, True), new_sequences=(new,))


@given(st.integers(1, 7), st.integers(1, 9), st.randoms(use_true_random=False))
def test_paths_are_those_of_transformers_where_costs_are_equal_too(rows: int, columns: int, random: Any) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    costs = np.array([[random.choice((-1.0, 0.0, 0.5)) for _ in range(columns)] for _ in range(rows)])
    of_rows, of_columns = _dynamic_time_warping(costs)
    first = [int(of_columns[of_rows == row].min()) for row in range(rows)]
    assert first_columns(costs).tolist() == first


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([[2, 0]], "alignment_heads has head 0 of layer 2; the decoder has 2 layers of 3 heads, counted from 0"),
        ([[1, 0], [1, 3]], "alignment_heads has head 3 of layer 1"),
        ([[0, -1]], "alignment_heads is [[0, -1]]; it must be a list of at most 1024 different pairs"),
        ([[0, 1], [0, 1]], "alignment_heads is [[0, 1], [0, 1]]; it must be"),
        ([[0]], "alignment_heads is [[0]]; it must be"),
    ],
)
def test_heads_that_do_not_exist_are_refused_by_name(heads: Any, words: str) -> None:
    config: Any = read_config({"model_type": "whisper", **SPEECH})
    with pytest.raises(StartError, match=re.escape(words)):
        Aligner.read(GenerationConfig.read({}, GENERATION | {"alignment_heads": heads}, SPEECH["vocab_size"]), config)


def test_a_filter_has_a_middle() -> None:
    with pytest.raises(ValueError, match="median_filter_width is 4; it must be odd"):
        read_config(json.loads(json.dumps({"model_type": "whisper", **SPEECH, "median_filter_width": 4})))
