"""What an encoder's files may say, and which of it ends the start in a sentence."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_encoder import write_encoder, write_modules

from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.settings import WorkerSettings

HOSTILE: dict[str, tuple[dict[str, object], str]] = {
    "a name for names": ({"architectures": "BertModel"}, "architectures is not a list of names"),
    "numbers for names": ({"architectures": [5]}, "architectures is not a list of names"),
    "no classes": ({"num_labels": -1}, "num_labels is -1; it must be a whole number from 1"),
    "more classes than there are names": ({"num_labels": 10**9}, "num_labels is 1000000000; it must be"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number from 1"),
    "an unknown function": ({"hidden_act": "os.system"}, "describes no network: KeyError: 'os.system'"),
    "positions that are not there": ({"model_type": "roberta", "pad_token_id": -5}, "pad_token_id is -5"),
}


@pytest.mark.parametrize(("change", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_a_config_that_makes_no_sense_is_refused_at_start(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path, str(change.get("model_type", "bert")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(StartError, match=sentence):
        load_worker(WorkerSettings(model=str(folder), threads=1, swap_space=0))


def test_settings_that_change_no_state_do_no_harm(tmp_path: Path) -> None:
    """They have the network give its states by no name, or refuse a number of tokens."""
    folder = write_encoder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"return_dict": False, "output_hidden_states": True, "chunk_size_feed_forward": 7}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_worker(WorkerSettings(model=str(folder), threads=1, swap_space=0)).info.prefill_tokens_per_second


def test_a_classifier_with_a_pooling_beside_it_is_refused(tmp_path: Path) -> None:
    """It is one or the other: config.json names a classifier, and modules.json has vectors made."""
    folder = write_modules(write_encoder(tmp_path, num_labels=1), "mean_tokens")
    with pytest.raises(StartError, match="supported are Transformer alone, for a classifier"):
        load_worker(WorkerSettings(model=str(folder), threads=1, swap_space=0))


def test_a_model_that_generates_reads_no_more_than_its_sentence_transformer_does(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path, dirs_exist_ok=True)
    write_modules(tmp_path, "lasttoken", "Normalize", max_length=44)
    settings = {"model": str(tmp_path), "threads": 1, "swap_space": 0, "num_gpu_blocks_override": 16, "forms": False}
    assert load_worker(WorkerSettings(**settings)).limits.max_model_len == 44
    with pytest.raises(StartError, match="--max-model-len is 45; the model's limit is 44"):
        load_worker(WorkerSettings(**settings, max_model_len=45))
