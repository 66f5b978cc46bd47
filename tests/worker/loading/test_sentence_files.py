"""What a folder of sentence-transformers says, and which of it cannot be followed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_encoder import write_modules

from pagewire_common.start_error import StartError
from worker_service.loading.sentence_files import SentenceSettings


def test_without_modules_the_family_says_how_and_vectors_are_1_long(tmp_path: Path) -> None:
    assert SentenceSettings.read(tmp_path, "LAST") == SentenceSettings("LAST", True, None)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("cls_token", "CLS"), ("mean_tokens", "MEAN"), ("lasttoken", "LAST")],
)
def test_pooling_norm_and_length_are_read(mode: str, expected: str, tmp_path: Path) -> None:
    write_modules(tmp_path, mode, "Normalize", max_length=40)
    assert SentenceSettings.read(tmp_path, "ALL") == SentenceSettings(expected, True, 40)
    write_modules(tmp_path, mode)
    assert not SentenceSettings.read(tmp_path, "ALL").normalizes


def test_the_newer_form_of_a_pooling_is_read(tmp_path: Path) -> None:
    write_modules(tmp_path, "mean_tokens")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 48, "pooling_mode": "cls"}')
    assert SentenceSettings.read(tmp_path, "ALL").pooling == "CLS"


network, pooling = {"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}


def write(folder: Path, *modules: dict[str, object]) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another pooling": (lambda folder: write_modules(folder, "max_tokens"), "pools by 'max_tokens'"),
    "a layer more": (
        lambda folder: write_modules(folder, "mean_tokens", "Dense"),
        "go through 'Transformer', 'Pooling', 'Dense'; supported are Transformer and Pooling",
    ),
    "a layer twice": (lambda folder: write_modules(folder, "mean_tokens", "Normalize", "Normalize"), "go through"),
    "no pooling": (lambda folder: (folder / "modules.json").write_text("[]"), "go through nothing"),
    "many layers": (lambda folder: write(folder, *[network] * 9), "names 9 modules"),
    "a large list": (lambda folder: write(folder, *[network] * 30_000), "at most 1048576 are read"),
    "no network": (lambda folder: write(folder, pooling), "go through 'Pooling'"),
    "another order": (lambda folder: write(folder, pooling, network), "go through 'Pooling', 'Transformer'"),
    "a network elsewhere": (
        lambda folder: write(folder, network | {"path": "0_Transformer"}, pooling),
        "has the network in '0_Transformer'; it must be in this folder",
    ),
    "a pooling in a number": (lambda folder: write(folder, network, pooling | {"path": 1}), "has the pooling in 1"),
    "lower case": (
        lambda folder: (write_modules(folder, "mean_tokens") / "sentence_bert_config.json").write_text(
            '{"do_lower_case": true}'
        ),
        "has texts made lower-case",
    ),
    "no list": (lambda folder: (folder / "modules.json").write_text("{}"), "is not a list of modules"),
    "no JSON": (lambda folder: (folder / "modules.json").write_text("["), "modules.json is not JSON"),
    "no folder of it": (
        lambda folder: write(folder, network, pooling | {"path": "nowhere"}),
        "cannot read",
    ),
    "a length of no tokens": (
        lambda folder: write_modules(folder, "mean_tokens", max_length=0),
        "max_seq_length is 0",
    ),
}


@pytest.mark.parametrize(("break_it", "sentence"), BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_followed_is_refused(break_it: Callable[[Path], object], sentence: str, tmp_path: Path) -> None:
    break_it(tmp_path)
    with pytest.raises(StartError, match=sentence):
        SentenceSettings.read(tmp_path, "MEAN")
