"""A config is enough to run a network of random weights: the same ones each time, and logits to sample from."""

import json
import math
from pathlib import Path

import pytest
import torch
from worker_helpers import state

from pagewire_common.start_error import StartError
from worker_service.execution.worker import Worker, load_worker
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.models.registry import build_model, read_config
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import SchedulerOutput
from worker_service.settings import WorkerSettings

CONFIG = {
    "model_type": "llama",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 60,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "dtype": "float16",
}
CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with nothing but a config."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def load(path: Path, load_format: str, dtype: str = "auto") -> Worker:
    settings = {"model": str(path), "device": "cpu", "load_format": load_format, "dtype": dtype, "swap_space": 0}
    return load_worker(WorkerSettings(**settings, num_gpu_blocks_override=8, cache=path.parent / "cache"))


def places() -> dict[str, torch.Tensor]:
    return build_model(read_config(CONFIG), torch.float32, CPU).checkpoint_tensors()


def test_a_config_is_enough(path: Path) -> None:
    worker = load(path, "dummy")
    assert (worker.info.model_id, worker.info.dtype) == ("model", "float16")
    assert [file.name for file in worker.tokenizer_files] == ["config.json"]
    with pytest.raises(StartError, match=r"model\.safetensors does not exist"):
        load(path, "auto")


def test_random_weights_are_not_taken_for_real_ones(tiny_checkpoint: Path) -> None:
    real, dummy = (load(tiny_checkpoint, load_format).info for load_format in ("auto", "dummy"))
    assert real.model_id == dummy.model_id
    assert real.model_fingerprint != dummy.model_fingerprint


def test_random_weights_are_the_same_each_time_and_fill_every_place() -> None:
    first, second = places(), places()
    for tensors in (first, second):
        for place in tensors.values():
            place.fill_(torch.nan)
        DummyWeights(CPU).load_into(tensors)
    for name, place in first.items():
        assert torch.equal(place, second[name]), name
        assert abs(place.mean() - int(name.endswith("norm.weight"))) < 0.02, name
        assert 0.01 < place.std() < 0.03, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_a_deep_network_are_finite_in_16_bits_and_differ(path: Path, dtype: str) -> None:
    runner = load(path, "dummy", dtype=dtype).runner
    sequence = state([5, 77, 199, 5, 3, 120], prompt_logprobs=10)
    output = runner.execute(SchedulerOutput(1, 1), [ScheduledChunk(sequence, start=0, stop=6, samples=True)])
    logprobs = output.prompt_logprobs[0].logprobs
    assert all(map(math.isfinite, logprobs))
    assert len(set(logprobs)) > 10
    assert not output.failed_sequence_ids
