"""What a folder of sentence-transformers says of how its network is pooled: modules.json, and the files that it names.

Whatever is not understood ends in a StartError that names the file: vectors would be made in another way than the
network was trained for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire_common.start_error import StartError
from worker_service.loading.json_file import read_any_json, read_json
from worker_service.wording import shown

_MODES = {"cls": "CLS", "cls_token": "CLS", "mean": "MEAN", "mean_tokens": "MEAN", "lasttoken": "LAST"}
"""The names of `PoolingType`, by those of sentence-transformers."""
_PREFIX = "pooling_mode_"
_MAX_BYTES = 1 << 20
_MAX_MODULES = 8
"""Of a list of modules."""
_PLAIN = ("Transformer", "Pooling")
_NORMALIZED = (*_PLAIN, "Normalize")
_SUPPORTED = "Transformer and Pooling, with or without Normalize"


@dataclass(frozen=True)
class SentenceSettings:
    """How vectors are made where a request does not say. `pooling` is the name of a `PoolingType`; `max_length` is in
    tokens, None where nothing is said.
    """

    pooling: str
    normalizes: bool = True
    max_length: int | None = None

    @classmethod
    def read(cls, folder: Path, otherwise: str) -> "SentenceSettings":
        """Of a folder, or, where it has no modules.json, the pooling that is given, 1 long. Raises StartError."""
        file = folder / "modules.json"
        if not file.is_file():
            return cls(otherwise)
        modules = [
            (str(module.get("type", "")).rpartition(".")[2], module.get("path", "")) for module in _modules(file)
        ]
        names = tuple(name for name, _ in modules)
        if names not in (_PLAIN, _NORMALIZED):
            what = ", ".join(map(shown, names)) or "nothing"
            raise StartError(f"{file} has texts go through {what}; supported are {_SUPPORTED}")
        (_, network), (_, pooling), *_ = modules
        if network != "":
            raise StartError(f"{file} has the network in {shown(network)}; it must be in this folder")
        if not isinstance(pooling, str):
            raise StartError(f"{file} has the pooling in {shown(pooling)}, which is no folder")
        kind = _pooling_type(folder / pooling / "config.json")
        return cls(kind, names == _NORMALIZED, _max_length(folder / "sentence_bert_config.json"))


def _modules(file: Path) -> list[dict[str, Any]]:
    modules = read_any_json(file, _MAX_BYTES)
    if not (isinstance(modules, list) and all(isinstance(module, dict) for module in modules)):
        raise StartError(f"{file} is not a list of modules")
    if len(modules) > _MAX_MODULES:
        raise StartError(f"{file} names {len(modules)} modules; supported are {_SUPPORTED}")
    return modules


def _pooling_type(file: Path) -> str:
    config = read_json(file)
    modes = [name.removeprefix(_PREFIX) for name, is_on in config.items() if name.startswith(_PREFIX) and is_on is True]
    if isinstance(mode := config.get("pooling_mode"), str):
        modes.append(mode)
    if len(modes) != 1 or modes[0] not in _MODES:
        what = " and ".join(map(shown, modes)) or "nothing"
        raise StartError(f"{file} pools by {what}; supported is one of {', '.join(sorted(_MODES))}")
    return _MODES[modes[0]]


def _max_length(file: Path) -> int | None:
    if not file.is_file():
        return None
    settings = read_json(file)
    if settings.get("do_lower_case"):
        raise StartError(f"{file} has texts made lower-case, which is not supported beside what the tokenizer does")
    length = settings.get("max_seq_length")
    if length is None:
        return None
    if type(length) is not int or length < 1:
        raise StartError(f"{file}: max_seq_length is {shown(length)}; it must be a whole number above 0")
    return length
