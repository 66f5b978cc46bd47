"""Finds a model by name (`default`, a folder, a GGUF file, or a name on the Hugging Face hub), or creates its directory
in the cache, in Hugging Face's layout. No code from the directory is run."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import structlog

from pagewire_common.start_error import StartError
from worker_service.loading.build_once import build_once
from worker_service.loading.default_model import GGUF_SHA256, build_default_model
from worker_service.loading.files.file_version import check_unchanged, version_of
from worker_service.loading.gguf.conversion import VERSION, convert_gguf
from worker_service.loading.gguf.file import find_parts, model_name

log = structlog.get_logger()

_HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
"""Files to download: data only, no pickles and no code."""
_HUB_WEIGHTS = ["*.safetensors"]


@dataclass(frozen=True)
class ModelSource:
    model_id: str
    path: Path


def find_model(model: str, cache: Path, *, with_weights: bool = True) -> ModelSource:
    """Download or convert into `cache` if needed. Raises StartError if there is no such model. with_weights: whether to
    download weights from the hub."""
    if model == "default":
        return ModelSource(model, build_once(_converted_folder(cache, GGUF_SHA256), build_default_model))
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return ModelSource(path.resolve().name, path)
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(model_name(path), _convert(path, cache))
    if path.exists():
        raise StartError(f"{path} is neither a Hugging Face directory nor a GGUF file")
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model[0] in ".-":
        raise StartError(f"there is no file or folder {path}")
    return ModelSource(model, _download(model, cache, _HUB_FILES + (_HUB_WEIGHTS if with_weights else [])))


def _convert(file: Path, cache: Path) -> Path:
    parts = find_parts(file)

    def build(folder: Path) -> None:
        log.info("converting from GGUF, once", file=str(file))
        convert_gguf(file, folder)
        for part, version in zip(parts, versions, strict=True):
            check_unchanged(part, version)  # a changed file would not match the digest

    versions = [version_of(part) for part in parts]
    digest = hashlib.sha256()
    for part in parts:
        try:
            with open(part, "rb") as stream:
                hashlib.file_digest(stream, lambda: digest)
        except OSError as error:
            raise StartError(f"cannot read {part}: {error.strerror}") from error
    return build_once(_converted_folder(cache, digest.hexdigest()), build)


def _converted_folder(cache: Path, digest: str) -> Path:
    return cache / "models" / f"{digest}-v{VERSION}"


def _download(name: str, cache: Path, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=files, cache_dir=cache / "hub"))
    except Exception as error:  # the hub's client raises errors of many types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StartError(
            f"'{name}' is no file or folder here, and cannot be downloaded from the Hugging Face hub: {reason}"
        ) from error
