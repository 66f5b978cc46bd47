"""Finds and checks the files of a model's tokenizer. The worker sends these files to the scheduler, which loads the
tokenizer from them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pagewire_common.model_files.tokenizer_config import TokenizerConfig, check_ids
from pagewire_common.start_error import StartError
from worker_service.loading.build_once import build_once
from worker_service.loading.files.json_file import read_json
from worker_service.wording import reason, shown

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
)
_SLOW = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_TEXTS = (".json", ".jinja", ".model", ".txt")
_PIECE_BYTES = 1 << 20


def find_tokenizer_files(path: Path, cache: Path, *, may_lack: bool = False) -> list[Path]:
    """Returns the files of a Hugging Face directory from which a tokenizer is loaded: all files in NAMES that exist.

    If the directory has a tokenizer in an older format and no tokenizer.json, the tokenizer is converted, and the
    result is stored in `cache`. Raises StartError if there is no tokenizer and `may_lack` is false. A request to a
    model without a tokenizer must contain token ids in place of text.
    """
    files = {name: path / name for name in NAMES if (path / name).is_file()}
    if "tokenizer.json" not in files:
        if may_lack and not _has_older_tokenizer(path):
            return list(files.values())
        converted = _convert(path, cache)
        files |= {name: converted / name for name in NAMES if (converted / name).is_file()}
    return list(files.values())


def vocabulary(files: list[Path]) -> dict[str, int]:
    """Returns the id of each token, including added tokens. The result is empty if there is no tokenizer. Raises
    StartError.

    tokenizer.json is parsed as plain JSON, because the tokenizers library is slower: with 262,000 tokens, the library
    uses 1.9 s of CPU time, and the JSON parser 0.8 s.
    """
    file = next((file for file in files if file.name == "tokenizer.json"), None)
    if file is None:
        return {}
    said = read_json(file)
    try:
        found = said["model"]["vocab"]
        ids = dict(found) if isinstance(found, dict) else {token: number for number, (token, _) in enumerate(found)}
        ids |= {token["content"]: token["id"] for token in said.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError):
        raise StartError(f"{file} has no vocabulary of a known form") from None
    if wrong := [token for token, token_id in ids.items() if type(token_id) is not int]:
        raise StartError(f"{file} gives the token {shown(wrong[0])} the id {shown(ids[wrong[0]])}, which is no number")
    return ids


def check_tokenizer(files: list[Path], vocabulary_size: int) -> None:
    """Raise StartError for a tokenizer that no scheduler can load for a model with `vocabulary_size` tokens."""
    TokenizerConfig.read({file.name: file for file in files})
    check_ids(vocabulary(files), vocabulary_size, "the model")


def eos_token_id(files: list[Path]) -> int | None:
    """The id of the tokenizer's end-of-sequence token."""
    return TokenizerConfig.read({file.name: file for file in files}).token_id("eos_token", vocabulary(files).get)


def read_pieces(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the files' contents in pieces of at most 1 MiB, each with the file's name. For an empty file, one empty
    piece is yielded."""
    for file in files:
        with open(file, "rb") as stream:
            piece = stream.read(_PIECE_BYTES)
            while True:
                yield file.name, piece
                piece = stream.read(_PIECE_BYTES)
                if not piece:
                    break


def _has_older_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in _SLOW)


def _convert(path: Path, cache: Path) -> Path:
    if not _has_older_tokenizer(path):
        raise StartError(f"{path} has no tokenizer: there is no tokenizer.json and nothing to make one of")

    def build(folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True).save_pretrained(folder)
        except Exception as error:  # the loader in transformers may raise any error
            raise StartError(
                f"the tokenizer in {path} cannot be converted to tokenizer.json: {reason(error)}"
            ) from error
        if not (folder / "tokenizer.json").is_file():
            raise StartError(f"the tokenizer in {path} has no form as tokenizer.json")

    # All text files in the folder are hashed, because transformers also reads added tokens, special tokens and the
    # model type from files besides the tokenizer's.
    digest = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.suffix in _TEXTS and file.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return build_once(cache / "tokenizers" / digest.hexdigest(), build)
