"""Folders of models with random weights, and what their decode steps read."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.gpu.shapes import SHAPES, step_bytes, write_model
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.registry import read_config


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_runs_natively_for_the_longest_load(name: str) -> None:
    config = read_config(SHAPES[name])
    assert isinstance(config, DecoderConfig)
    assert config.max_model_len >= 8448


def test_every_id_of_the_vocabulary_has_a_text(tmp_path: Path) -> None:
    write_model(SHAPES["tiny"], tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny/tokenizer.json"))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == SHAPES["tiny"]["vocab_size"]
    assert tokenizer.decode([2000, 2001]).strip() == "w1743 w1744"


def test_a_step_reads_all_weights_once_and_the_keys_and_values_of_each_sequence() -> None:
    """Llama 3 8B: 8.03 billion weights, of which 0.53 are vectors of tokens; 128 KiB of keys and values a token."""
    weights = step_bytes(SHAPES["llama-8b"], 0, 0)
    assert weights == pytest.approx(2 * (8.030e9 - 128256 * 4096), rel=1e-3)
    assert step_bytes(SHAPES["llama-8b"], 32, 1000.5) == pytest.approx(weights + 32 * 1000.5 * 128 * 1024)


def test_vectors_of_tokens_are_read_where_they_make_the_logits() -> None:
    """Llama 3.2 1B: 1.236 billion weights, which one table for both is a part of."""
    assert step_bytes(SHAPES["llama-1b"], 0, 0) == pytest.approx(2 * 1.236e9, rel=1e-3)


def test_more_sequences_need_more_of_the_experts() -> None:
    """Qwen3 30B A3B: 3.3 billion weights for one token, vectors of tokens included, and 30.5 in all."""
    shape = SHAPES["qwen3-30b-a3b"]
    vectors = 151936 * 2048
    assert step_bytes(shape, 1, 0) == pytest.approx(2 * (3.35e9 - vectors), rel=0.01)
    assert step_bytes(shape, 256, 0) == pytest.approx(2 * (30.53e9 - vectors), rel=0.01)
