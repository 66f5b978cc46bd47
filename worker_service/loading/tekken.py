"""Converts a tokenizer in Mistral's own format, tekken.json, in transformers' code.

transformers' code takes ids from the places in the file's lists, and lets later tokens replace earlier ones. So the
file is checked here first.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from pagewire_common.model_files.tokenizer_config import FILE as CONFIG
from pagewire_common.start_error import StartError
from worker_service.loading.files.json_file import read_any_json, read_json
from worker_service.wording import shown

NAME = "tekken.json"
_MAX_SPECIAL = 1 << 16
"""Special tokens. Published files have 1,000."""


def convert_tekken(path: Path, folder: Path) -> None:
    """Write the files of path/tekken.json's tokenizer into `folder`, with what path/tokenizer_config.json says. Raises
    StartError, and the errors of transformers."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    file = path / NAME
    try:
        _check(read_any_json(file))
    except ValueError as error:
        raise StartError(f"{file}: {error}") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise StartError(f"{file} is no tokenizer in Mistral's format: {type(error).__name__}: {error}") from None
    convert_tekken_tokenizer(str(file)).save_pretrained(folder)
    if (path / CONFIG).is_file():
        config = read_json(folder / CONFIG) | read_json(path / CONFIG)
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _check(said: Any) -> None:
    """Raises ValueError if ids would not be those that the file says, and other errors for values of other types."""
    special, vocabulary = _in_order(said, "special_tokens"), _in_order(said, "vocab")
    num_special, size = (said["config"].get(f"default_{name}") for name in ("num_special_tokens", "vocab_size"))
    if num_special is None:
        num_special = len(special)
    if type(num_special) is not int or not len(special) <= num_special <= _MAX_SPECIAL:
        raise ValueError(
            f"default_num_special_tokens is {shown(num_special)}; it must be a whole number from {len(special)}, the "
            f"number of special_tokens, to {_MAX_SPECIAL}"
        )
    most = num_special + len(vocabulary)
    if size is not None and not (type(size) is int and num_special <= size <= most):
        raise ValueError(f"default_vocab_size is {shown(size)}; it must be a whole number from {num_special} to {most}")
    texts = [token["token_str"] for token in special]
    _check_distinct("special_tokens", texts)
    for text in ("<s>", "</s>"):  # transformers would give a missing one an id that the model does not have
        if text not in texts:
            raise ValueError(f"special_tokens lacks {text}")
    used = vocabulary[: None if size is None else size - num_special]
    try:
        found = [base64.b64decode(token["token_bytes"], validate=True) for token in used]
    except binascii.Error:
        raise ValueError("token_bytes of a token in vocab is not base64") from None
    _check_distinct("vocab", found)
    if missing := {bytes([byte]) for byte in range(256)}.difference(found):
        raise ValueError(f"vocab lacks the byte {min(missing)[0]}, so it has no tokens for some texts")


def _in_order(said: Any, name: str) -> list[Any]:
    """A list of tokens, by their ranks. Raises ValueError if a rank is missing, or there twice."""
    tokens = said.get(name)
    if tokens is None:
        raise ValueError(f"{name} is missing; files of the first version, which have none, are not read")
    ranks = [token["rank"] for token in tokens]
    if name == "special_tokens":
        tokens, ranks = sorted(tokens, key=lambda token: token["rank"]), sorted(ranks)  # transformers sorts them, too
    for number, rank in enumerate(ranks):
        if rank != number:
            raise ValueError(f"{name} has the rank {shown(rank)} in place of {number}")
    return list(tokens)


def _check_distinct(name: str, tokens: list[Any]) -> None:
    seen = set[Any]()
    for token in tokens:
        if token in seen:
            raise ValueError(f"{name} has the token {shown(token)} twice")
        seen.add(token)
