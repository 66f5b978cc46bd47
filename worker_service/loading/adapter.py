"""Reads and checks a low-rank adapter in PEFT's format (LoRA; Hu et al., 2021). An adapter adds `scaling * B @ A` to
the weights of projections. Adapters with any other effect are refused."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.loading.files.safetensors_header import StoredTensor, read_header
from worker_service.loading.files.tensor_names import spellings
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.parallel.cut import Cut
from worker_service.wording import shown

WEIGHTS = "model.safetensors"
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base model's weights unchanged."""
_LARGEST = 1e6
"""Maximum of `lora_alpha`; above it, rounding errors dominate the scaled weights."""
_BEFORE = "base_model.model."
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_REFUSED = {
    "use_dora": "DoRA, which scales the whole weights",
    "modules_to_save": "whole modules beside the low-rank ones",
    "layer_replication": "layers twice",
    "trainable_token_indices": "token embeddings",
    "alora_invocation_tokens": "adapters that begin within a prompt",
    "target_parameters": "parameters of experts",
    "lora_bias": "biases",
    "use_qalora": "pooled inputs (QALoRA)",
    "use_bdlora": "blocks of weights (BD-LoRA)",
    "arrow_config": "a choice between adapters for each token (Arrow)",
    "velora_config": "compressed inputs (VeLoRA)",
}
"""Keys of unsupported features, with names for the error message."""
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "target_modules", "task_type", "unsloth_fixed", "unsloth_version",
})  # fmt: skip
"""Ignored keys of adapter_config.json: training settings, and facts that the tensors show."""
_READ = frozenset({"alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "use_rslora"})


class AdapterError(Exception):
    """Raised if this model cannot use an adapter."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in host memory. `halves`: A [rank, inputs] and scaled B [outputs, rank] by projection."""

    halves: Mapping[str, tuple[Tensor, Tensor]]

    def part(self, cuts: Mapping[str, Cut]) -> "Adapter":
        """The part for one tensor-parallel rank. cuts: by weight name; projections without a cut stay whole."""
        found = {name: (cuts.get(f"{name}.weight"), pair) for name, pair in self.halves.items()}
        return Adapter({name: pair if cut is None else cut.of_halves(*pair) for name, (cut, pair) in found.items()})

    def pieces(self, num_bytes: int) -> Iterator["Adapter"]:
        """Split into pieces of whole projections. A piece has at most `num_bytes`, or a single projection."""
        piece, size = dict[str, tuple[Tensor, Tensor]](), 0
        for name, (a, b) in self.halves.items():
            if piece and size + a.nbytes + b.nbytes > num_bytes:
                yield Adapter(piece)
                piece, size = {}, 0
            piece[name] = a, b
            size += a.nbytes + b.nbytes
        yield Adapter(piece)

    @property
    def num_bytes(self) -> int:
        return sum(half.nbytes for pair in self.halves.values() for half in pair)


def read_adapter(
    config: bytes, folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype
) -> Adapter:
    """`config`: content of adapter_config.json; `folder` contains `WEIGHTS`. Raises AdapterError. shapes: outputs and
    inputs of each projection that can have an adapter, by its name in a checkpoint."""
    fields = _read_config(config)
    try:
        tensors = read_header(folder / WEIGHTS).tensors
        halves = _check_tensors(tensors, shapes, max_rank)
        places = {
            name: torch.empty(tensors[name].shape, dtype=torch.float32) for pair in halves.values() for name in pair
        }
        WeightFiles(folder).load_into(places)
    except StartError as error:
        raise AdapterError(str(error).replace(f"{folder / WEIGHTS}", "adapter_model.safetensors")) from None
    adapter = {}
    for module, (a, b) in halves.items():
        named = a.removeprefix(_BEFORE).removesuffix(".lora_A.weight")
        scaled = places.pop(b) * _scaling(named, tensors[a].shape[0], fields)
        pair = places.pop(a).to(dtype), scaled.to(dtype)
        for half, name in zip(pair, (a, b), strict=True):
            if not half.isfinite().all():
                raise AdapterError(f"tensor {name} has numbers that are not finite in {dtype}")
        adapter[module] = pair
    return Adapter(adapter)


def _read_config(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError("adapter_config.json is not JSON") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise AdapterError("adapter_config.json: peft_type must be LORA")
    for name, meaning in _REFUSED.items():
        if fields.get(name):
            raise AdapterError(f"adapter_config.json: {name} asks for {meaning}, which is not supported")
    if fields.get("init_lora_weights", True) not in _PLAIN_BEGINNINGS:
        raise AdapterError(
            f"adapter_config.json: init_lora_weights is {shown(fields['init_lora_weights'])}; such adapters may change "
            "the base's weights when they are loaded, which is not supported (PEFT can convert them)"
        )
    if fields.get("bias", "none") != "none":
        raise AdapterError("adapter_config.json: bias must be none")
    if fields.get("fan_in_fan_out"):
        raise AdapterError("adapter_config.json: fan_in_fan_out (transposed weights) is not supported")
    for name, value in fields.items():
        if value and name not in _WITHOUT_EFFECT | _READ | _REFUSED.keys():
            raise AdapterError(
                f"adapter_config.json: {shown(name)} is {shown(value)}, which is not supported and may change what the "
                "adapter adds"
            )
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(fields.get(name) or {}, dict):
            raise AdapterError(f"adapter_config.json: {name} must be an object")
    if not _is_number(fields.get("lora_alpha")):
        raise AdapterError(f"adapter_config.json: lora_alpha is {shown(fields.get('lora_alpha'))}, not a number")
    return fields


def _check_tensors(
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, int]],
    max_rank: int,
) -> dict[str, tuple[str, str]]:
    """Returns the names of A and B for each projection."""
    halves: dict[str, dict[str, str]] = {}
    # An adapter of a whole network that also reads images has longer names.
    by_spelling = {spelling: name for name in shapes for spelling in spellings(name)}
    for name in tensors:
        found = _NAME.fullmatch(name)
        if found is None:
            raise AdapterError(f"there is a tensor {shown(name)}, which is neither lora_A nor lora_B of a projection")
        pair = halves.setdefault(by_spelling.get(found["module"], found["module"]), {})
        if pair.setdefault(found["half"], name) != name:
            first = shown(pair[found["half"]])
            raise AdapterError(f"there are two tensors for one half of a projection: {first} and {shown(name)}")
    if not halves:
        raise AdapterError("it has no tensors")
    pairs = {}
    for module, pair in halves.items():
        if module not in shapes:
            raise AdapterError(f"this model has no adapters for {shown(module)}")
        if len(pair) < 2:
            raise AdapterError(f"{module} has lora_{next(iter(pair))} alone")
        (outputs, inputs), rank = shapes[module], (tensors[pair["A"]].shape or (0,))[0]
        if not 1 <= rank <= max_rank:
            raise AdapterError(
                f"{module} has rank {rank}; this worker takes ranks from 1 to {max_rank} (--max-lora-rank)"
            )
        for name, wanted in ((pair["A"], (rank, inputs)), (pair["B"], (outputs, rank))):
            if tensors[name].shape != wanted:
                raise AdapterError(
                    f"tensor {name} is {list(tensors[name].shape)}, where the model asks for {list(wanted)}"
                )
        pairs[module] = pair["A"], pair["B"]
    return pairs


def _scaling(module: str, rank: int, fields: Mapping[str, Any]) -> float:
    """PEFT's scaling factor: alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski, 2023)."""
    alpha = _of_module(module, fields.get("alpha_pattern") or {}, fields["lora_alpha"])
    if not _is_number(alpha):
        raise AdapterError(f"adapter_config.json: alpha_pattern has {shown(alpha)}, which is not a number")
    return float(alpha) / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _of_module(module: str, pattern: Mapping[str, Any], default: Any) -> Any:
    """The value of the first key that ends the module's name. Regular expressions are refused."""
    for name, value in pattern.items():
        if re.search(r"[^\w.]", name):
            raise AdapterError(f"adapter_config.json: {shown(name)} is a pattern, and only names are supported")
        if module == name or module.endswith(f".{name}"):
            return value
    return default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
