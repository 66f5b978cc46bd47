"""A tokenizer in Mistral's own format becomes a tokenizer.json with the same ids, or is refused."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pagewire_common.model_files.tokenizer_config import TokenizerConfig
from pagewire_common.start_error import StartError
from worker_service.loading.tokenizer_files import check_tokenizer, eos_token_id, find_tokenizer_files


def write_tekken(folder: Path, spoil: Callable[[dict[str, Any]], object] = lambda content: None) -> None:
    """A tokenizer of bytes and "ab" in Mistral's own format, with 26 special tokens before them."""
    special = {0: "<unk>", 1: "<s>", 2: "</s>", 11: "<pad>", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]"}
    content: dict[str, Any] = {
        "config": {"pattern": r"\S+|\s", "default_vocab_size": 283, "default_num_special_tokens": 26, "version": "v11"},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), b"ab", b"beyond"])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": special.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
            for rank in range(26)
        ],
    }
    spoil(content)
    (folder / "tekken.json").write_text(json.dumps(content))


def test_a_tokenizer_in_mistrals_own_format_is_converted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tekken(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    files = {file.name: file for file in find_tokenizer_files(folder, tmp_path / "cache")}
    check_tokenizer([*files.values()], 283)
    tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
    assert tokenizer.encode("ab a[AUDIO]é", add_special_tokens=False).ids == [
        26 + 256, 26 + ord(" "), 26 + ord("a"), 24, *(26 + byte for byte in "é".encode())
    ]  # fmt: skip
    assert eos_token_id([*files.values()]) == 2
    read = TokenizerConfig.read(files)
    assert read.chat_template is not None
    assert read.chat_template.text == "{{ messages[0].content }}"


def test_what_tokenizer_config_json_says_beside_it_is_obeyed(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    said = {"chat_template": "{{ messages[0].content }}", "eos_token": "[AUDIO]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    files = find_tokenizer_files(tmp_path, tmp_path / "cache")
    assert eos_token_id(files) == 24
    read = TokenizerConfig.read({file.name: file for file in files})
    assert read.chat_template is not None
    assert read.chat_template.text == said["chat_template"]
    assert read.special["bos_token"].content == "<s>"


SPOILED_TEKKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no list": (lambda said: said.pop("vocab"), "tekken.json: vocab is missing"),
    "no special tokens": (lambda said: said.pop("special_tokens"), "tekken.json: special_tokens is missing; files of"),
    "another kind": (lambda said: said.update(vocab=[3]), "tekken.json is no tokenizer in Mistral's format: TypeError"),
    "another order": (lambda said: said["vocab"].reverse(), "vocab has the rank 257 in place of 0"),
    "a rank twice": (
        lambda said: said["special_tokens"][5].update(rank=4),
        "special_tokens has the rank 4 in place of",
    ),
    "a token twice": (lambda said: said["vocab"][256].update(token_bytes="YQ=="), "vocab has the token b'a' twice"),
    "a special token twice": (
        lambda said: said["special_tokens"][5].update(token_str="[AUDIO]"),
        "special_tokens has the token '[AUDIO]' twice",
    ),
    "no end": (lambda said: said["special_tokens"][2].update(token_str="end"), "special_tokens lacks </s>"),
    "no base64": (lambda said: said["vocab"][256].update(token_bytes="!"), "token_bytes of a token in vocab is not"),
    "no tokens for a byte": (
        lambda said: said["vocab"][255].update(token_bytes="YWJj"),
        "vocab lacks the byte 255, so it has no tokens for some texts",
    ),
    "few special tokens": (
        lambda said: said["config"].update(default_num_special_tokens=2),
        "default_num_special_tokens is 2; it must be a whole number from 26, the number of special_tokens, to 65536",
    ),
    "many special tokens": (
        lambda said: said["config"].update(default_num_special_tokens=1 << 40),
        "default_num_special_tokens is 1099511627776",
    ),
    "a small vocabulary": (
        lambda said: said["config"].update(default_vocab_size=25),
        "default_vocab_size is 25; it must be a whole number from 26 to 284",
    ),
    "no regular expression": (lambda said: said["config"].update(pattern="("), "cannot be converted to tokenizer.json"),
}


@pytest.mark.parametrize(("spoil", "sentence"), SPOILED_TEKKEN.values(), ids=SPOILED_TEKKEN)
def test_a_wrong_file_of_mistrals_own_format_is_refused(
    spoil: Callable[[dict[str, Any]], object], sentence: str, tmp_path: Path
) -> None:
    write_tekken(tmp_path, spoil)
    with pytest.raises(StartError, match=re.escape(sentence)):
        find_tokenizer_files(tmp_path, tmp_path / "cache")
