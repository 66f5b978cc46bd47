"""Finds and checks the tokenizer files, which the worker sends to the scheduler."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pagewire_common.model_files.tokenizer_config import TokenizerConfig, check_ids
from pagewire_common.sounds.families import has_sounds
from pagewire_common.start_error import StartError
from worker_service.loading import tekken
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
    "preprocessor_config.json",
    "processor_config.json",
)
_OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
"""Files that only models with images or sounds in prompts send. Other models, such as Whisper, keep their
fingerprint."""
_SLOW = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", tekken.NAME)
_TEXTS = (".json", ".jinja", ".model", ".txt")
_PIECE_BYTES = 1 << 20


def find_tokenizer_files(path: Path, cache: Path, *, may_lack: bool = False) -> list[Path]:
    """All files in NAMES that exist and describe the model. An older tokenizer is converted to tokenizer.json in
    `cache`. Raises StartError if there is no tokenizer, unless `may_lack`: requests then contain token ids in place of
    text."""
    files = {name: path / name for name in NAMES if (path / name).is_file()}
    if not _has_images(files):
        files = {name: file for name, file in files.items() if name not in _OF_IMAGES}
    if "tokenizer.json" not in files:
        if may_lack and not _has_older_tokenizer(path):
            return list(files.values())
        converted = _convert(path, cache)
        files |= {name: converted / name for name in NAMES if (converted / name).is_file()}
    return list(files.values())


def vocabulary(files: list[Path]) -> dict[str, int]:
    """Ids of all tokens, including added ones; empty without a tokenizer. Raises StartError. Parsed as plain JSON: for
    262,000 tokens 0.8 s of CPU time, against 1.9 s with the tokenizers library."""
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
    """Raise StartError if the scheduler could not load the tokenizer for this model."""
    TokenizerConfig.read({file.name: file for file in files})
    check_ids(vocabulary(files), vocabulary_size, "the model")


def eos_token_id(files: list[Path]) -> int | None:
    return TokenizerConfig.read({file.name: file for file in files}).token_id("eos_token", vocabulary(files).get)


def read_pieces(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield file names and pieces of at most 1 MiB; one empty piece for an empty file."""
    for file in files:
        with open(file, "rb") as stream:
            piece = stream.read(_PIECE_BYTES)
            while True:
                yield file.name, piece
                piece = stream.read(_PIECE_BYTES)
                if not piece:
                    break


def _has_images(files: Mapping[str, Path]) -> bool:
    if not files.keys() & {*_OF_IMAGES} or "config.json" not in files:
        return False
    config = read_json(files["config.json"])
    return bool(config.get("vision_config")) or has_sounds(config)


def _has_older_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in _SLOW)


def _convert(path: Path, cache: Path) -> Path:
    if not _has_older_tokenizer(path):
        raise StartError(f"{path} has no tokenizer: there is no tokenizer.json, and no older format to convert")

    def build(folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            if (path / tekken.NAME).is_file():  # AutoTokenizer would use mistral-common if it is installed
                tekken.convert_tekken(path, folder)
            else:
                tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
                tokenizer.save_pretrained(folder)
        except StartError:
            raise
        except Exception as error:  # transformers may raise any error
            raise StartError(
                f"the tokenizer in {path} cannot be converted to tokenizer.json: {reason(error)}"
            ) from error
        if not (folder / "tokenizer.json").is_file():
            raise StartError(f"the tokenizer in {path} cannot be saved as tokenizer.json")

    # All text files: transformers also reads added tokens, special tokens and the model type from other files.
    digest = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.suffix in _TEXTS and file.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return build_once(cache / "tokenizers" / digest.hexdigest(), build)
