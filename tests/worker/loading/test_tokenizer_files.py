"""A worker refuses at its start what no scheduler could load beside it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire_common.model_files.tokenizer_config import MAX_MORE
from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.loading.files.json_file import read_json
from worker_service.loading.tokenizer_files import check_tokenizer
from worker_service.settings import WorkerSettings


def write(folder: Path, **changes: object) -> list[Path]:
    parts = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}, "added_tokens": []} | changes
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    return [*folder.iterdir()]


def test_a_tokenizer_may_know_some_tokens_more_than_the_model(tmp_path: Path) -> None:
    for most in (2, 1 + MAX_MORE):
        check_tokenizer(write(tmp_path, added_tokens=[{"id": most, "content": "<pad>"}]), 2)
    with pytest.raises(StartError, match="the token '<pad>' the id 65538; the model has 2 tokens, and ids must be"):
        check_tokenizer(write(tmp_path, added_tokens=[{"id": 2 + MAX_MORE, "content": "<pad>"}]), 2)


@pytest.mark.parametrize(
    "changes",
    [{"model": None}, {"model": {}}, {"model": {"vocab": [3]}}, {"model": {"vocab": 3}}, {"added_tokens": [{"id": 3}]}],
)
def test_a_tokenizer_without_a_vocabulary_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json has no vocabulary of a known form"):
        check_tokenizer(write(tmp_path, **changes), 2)


def test_an_id_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"gives the token 'b' the id '1', which is no number"):
        check_tokenizer(write(tmp_path, model={"vocab": {"a": 0, "b": "1"}}), 2)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a template of bytes": (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xe9"), "is not in UTF-8"),
    "half a character": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"bos_token": "\\ud800"}'),
        "half of a surrogate pair in 'bos_token'",
    ),
    "a far id": (lambda folder: write(folder, model={"vocab": {"a": 2**32 - 1}}), "the id 4294967295; the model has"),
    "a far default": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 4294967295}'),
        "generation_config.json: eos_token_id is 4294967295; it must be a token id of the model's vocabulary",
    ),
    "a contradiction": (
        lambda folder: (folder / "generation_config.json").write_text('{"min_length": 9, "max_length": 8}'),
        "min_length is 9, above max_length",
    ),
}


@pytest.mark.parametrize(("spoil", "sentence"), SPOILED.values(), ids=SPOILED)
def test_no_worker_starts_beside_it(
    spoil: Callable[[Path], object], sentence: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Without forms, too, for which a worker reads end tokens."""
    shutil.copytree(tiny_checkpoint, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    with pytest.raises(StartError, match=sentence):
        load_worker(
            WorkerSettings(model=str(tmp_path), threads=1, num_gpu_blocks_override=16, swap_space=0, forms=False)
        )


def test_a_name_with_two_values_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ('{"a": {"b": 1, "b": true}}', '{"a": {"b": 1, "b": 1.0}}'):
        file.write_text(text)
        with pytest.raises(StartError, match=r"config\.json is not JSON: 'b' is there twice, as 1 and as "):
            read_json(file)
    file.write_text('{"a": 1, "a": 1, "b": NaN, "b": NaN}')
    assert read_json(file)["a"] == 1
