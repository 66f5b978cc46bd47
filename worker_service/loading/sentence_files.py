"""Reads pooling settings in the format of sentence-transformers: modules.json and the files that it names. Unknown keys
are refused with a StartError, because they could change the vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire_common.model_files.sentence_config import FILE, SentenceConfig
from pagewire_common.start_error import StartError
from worker_service.loading.files.json_file import read_any_json, read_json
from worker_service.wording import shown

_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
"""sentence-transformers' names of pooling types, with those of `PoolingType`."""
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip
_MAX_BYTES = 1 << 20
_MAX_MODULES = 8
"""Entries of modules.json."""
_PACKAGE = "sentence_transformers."
_PLAIN = ("Transformer", "Pooling")
_NORMALIZED = (*_PLAIN, "Normalize")
_SUPPORTED = "Transformer and Pooling, with or without Normalize"
_OF_THE_NETWORK = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta",
    "xlnet")
)  # fmt: skip
"""Files with the network's settings; old releases put the family into the name. The first that exists is used."""
_ARGUMENTS = ("config_args", "config_kwargs", "model_args", "model_kwargs", "processor_kwargs", "tokenizer_args")
_SAY_NOTHING: Mapping[str, tuple[object, ...]] = {
    "document_length": (None,),
    "do_lower_case": (None, False),
    "processing_kwargs": (None, {}),
    "query_expansion": (None,),
    "query_length": (None,),
    "tokenizer_name_or_path": (None, ""),
    "transformer_task": (None, "feature-extraction"),
    "module_output_name": (None, "token_embeddings"),
    "unpad_inputs": (None, True, False),  # changes only the layout of a batch
    **dict.fromkeys(_ARGUMENTS, (None, {}, {"trust_remote_code": True}, {"trust_remote_code": False})),
}
_OF_A_CLASSIFIER = {"transformer_task": (None, "sequence-classification"), "module_output_name": (None, "scores")}
_TEXT_METHODS = tuple({"method": "forward", "method_output_name": output} for output in ("last_hidden_state", "logits"))


@dataclass(frozen=True)
class SentenceSettings:
    """A model's pooling settings, the defaults of requests.

        `pooling`      name of a `PoolingType`.
        `max_length`   maximum of an input's tokens; None without a limit.

    If `normalizes`, vectors are scaled to length 1.
    """

    pooling: str
    normalizes: bool = True
    max_length: int | None = None

    @classmethod
    def read(
        cls, folder: Path, otherwise: str, config: Mapping[str, Any] | None = None, num_labels: int = 0
    ) -> "SentenceSettings":
        """Without modules.json: the pooling type `otherwise`, vectors of length 1. Raises StartError. config: content
        of config.json; num_labels: classes of a classifier, otherwise 0."""
        sentences = read_json(folder / FILE) if (folder / FILE).is_file() else {}
        SentenceConfig.read(config or {}, sentences, num_labels)  # also checks what the scheduler reads
        file = folder / "modules.json"
        if not file.is_file():
            return cls(otherwise)
        modules = _modules(file)
        names = tuple(_name(module) for module in modules)
        supported = (("Transformer",),) if num_labels else (_PLAIN, _NORMALIZED)
        if names not in supported:
            what = ", ".join(map(shown, names))
            raise StartError(
                f"{file} lists the modules [{what}]; supported are "
                f"{'Transformer alone, for a classifier' if num_labels else _SUPPORTED}"
            )
        network, *others = [module.get("path", "") for module in modules]
        if network != "":
            raise StartError(f"{file} has the network in {shown(network)}; it must be in this folder")
        max_length = _max_length(folder, is_classifier=num_labels > 0)
        if num_labels:
            return cls(otherwise, max_length=max_length)
        if wrong := [path for path in others if not isinstance(path, str)]:
            raise StartError(f"{file} has the pooling or the norm in {shown(wrong[0])}, which is no folder")
        for path in others[1:]:
            _check_norm(folder / path / "config.json")
        return cls(_pooling_type(folder / others[0] / "config.json"), names == _NORMALIZED, max_length)


def _modules(file: Path) -> list[dict[str, Any]]:
    modules = read_any_json(file, _MAX_BYTES)
    if not (isinstance(modules, list) and all(isinstance(module, dict) for module in modules)):
        raise StartError(f"{file} is not a list of modules")
    if len(modules) > _MAX_MODULES:
        raise StartError(f"{file} names {len(modules)} modules; supported are {_SUPPORTED}")
    for module in modules:
        _refuse_unknown(file, module, ("idx", "name", "path", "type"), {"kwargs": (None, [], {})})
    return modules


def _name(module: Mapping[str, Any]) -> str:
    """The class name without its module, which differs between releases. Other packages' classes keep theirs, and so
    are refused."""
    kind = module.get("type")
    return kind.rpartition(".")[2] if isinstance(kind, str) and kind.startswith(_PACKAGE) else str(kind)


def _pooling_type(file: Path) -> str:
    config = read_json(file)
    sizes = ("word_embedding_dimension", "embedding_dimension")  # repeat the network's size
    _refuse_unknown(file, config, (*sizes, "pooling_mode", *_FLAGS), {"include_prompt": (None, True)})
    modes = set()
    for flag, mode in _FLAGS.items():
        if not isinstance(is_on := config.get(flag, False), bool):
            raise StartError(f"{file}: {flag} is {shown(is_on)}; it must be true or false")
        modes |= {mode} if is_on else set()
    named = config.get("pooling_mode", [])
    for mode in named if isinstance(named, list) else [named]:
        modes.add(mode if isinstance(mode, str) else shown(mode))
    if len(modes) != 1 or not modes <= _MODES.keys():
        what = " and ".join(map(shown, sorted(modes))) or "nothing"
        raise StartError(f"{file} pools by {what}; supported is one of {', '.join(sorted(_MODES))}")
    return _MODES[modes.pop()]


def _check_norm(file: Path) -> None:
    if file.is_file():
        said = ("module_input_name", "module_output_name")
        _refuse_unknown(file, read_json(file), (), dict.fromkeys(said, (None, "sentence_embedding")))


def _max_length(folder: Path, *, is_classifier: bool) -> int | None:
    file = next((folder / name for name in _OF_THE_NETWORK if (folder / name).is_file()), None)
    if file is None:
        return None
    settings = read_json(file)
    say_nothing = {**_SAY_NOTHING, **(_OF_A_CLASSIFIER if is_classifier else {})}
    _refuse_unknown(file, settings, ("max_seq_length", "modality_config"), say_nothing)
    modalities = settings.get("modality_config") or {}
    if not isinstance(modalities, dict) or modalities.get("text", _TEXT_METHODS[0]) not in _TEXT_METHODS:
        raise StartError(f"{file}: modality_config is {shown(modalities)}; supported are texts by the method 'forward'")
    length = settings.get("max_seq_length")
    if length is None:
        return None
    if type(length) is not int or length < 1:
        raise StartError(f"{file}: max_seq_length is {shown(length)}; it must be a whole number above 0")
    return length


def _refuse_unknown(
    file: Path, found: Mapping[str, Any], known: Sequence[str], say_nothing: Mapping[str, tuple[object, ...]]
) -> None:
    """Raise StartError for an unknown key or a value with an effect."""
    for key, value in found.items():
        if key in known:
            continue
        if key not in say_nothing:
            raise StartError(f"{file} has {shown(key)} = {shown(value)}, which is unknown and may change vectors")
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in say_nothing[key]):
            neutral = " or ".join(shown(other) for other in say_nothing[key] if other is not None) or "null"
            raise StartError(f"{file}: {key} is {shown(value)}, which is not supported; it must be {neutral}")
