"""What an encoder's files may say, and which of it ends the start in a sentence."""

import json
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
    "no heads": ({"num_attention_heads": 0}, "describes no network: ZeroDivisionError"),
    "an unknown function": ({"hidden_act": "os.system"}, "describes no network: KeyError: 'os.system'"),
    "positions that are not there": ({"model_type": "roberta", "pad_token_id": -5}, "cannot be computed"),
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


def test_what_lies_beside_a_classifier_about_vectors_is_passed_over(tmp_path: Path) -> None:
    folder = write_modules(write_encoder(tmp_path, num_labels=1), "max_tokens")
    assert load_worker(WorkerSettings(model=str(folder), threads=1, swap_space=0)).limits.num_labels == 1
