"""The files of a head: an EAGLE-3 head in its own folder, or the target's layer for multi-token prediction. Every fault
in the files raises a StartError."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.execution.cache.cache_engine import CacheShape
from worker_service.execution.startup.network import Network
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.model_store import find_model
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.eagle import EagleHead
from worker_service.models.decoders.eagle_config import EagleConfig
from worker_service.models.decoders.families import WITH_MTP
from worker_service.models.decoders.head_layer import Head, num_state_layers
from worker_service.models.decoders.mtp import MtpHead
from worker_service.settings import WorkerSettings
from worker_service.speculative_config import SpeculativeConfig
from worker_service.wording import reason

_LAYER_NAMES = ("midlayer", "layers.0")
"""The names of an EAGLE-3 head's layer in checkpoints by EAGLE's authors and by the library `speculators`."""


class HeadFiles(Protocol):
    """The open files of a head. Only `load` allocates memory for weights."""

    @property
    def shape(self) -> CacheShape:
        """The shape of a block in the head's cache."""

    @property
    def max_model_len(self) -> int: ...

    def check(self) -> list[int]:
        """The maximum bytes of each weight, see `Network.check`."""

    def load(self, target: Decoder) -> Head:
        """Load the head, after the target's network. Raises StartError."""


def open_head(speculation: SpeculativeConfig, settings: WorkerSettings, target: Network) -> HeadFiles:
    """Open or download the head that `--speculative-config` names. Raises StartError if it does not fit the target."""
    if not isinstance(target.config, DecoderConfig):
        raise StartError(f"{speculation.flag} is for the families that run natively; {target.model_id} does not")
    if speculation.method == "mtp":
        return MtpFiles.open(target, target.config)
    assert speculation.model is not None
    return EagleFiles.open(speculation.model, settings, target, target.config)


def _shape(layer: DecoderConfig, target: Network) -> CacheShape:
    num_layers = 1 + num_state_layers(layer)
    return CacheShape(num_layers, target.shape.block_size, layer.num_kv_heads, layer.head_dim, target.dtype)


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]


@dataclass(frozen=True)
class MtpFiles:
    """The layer for multi-token prediction among the target's weights."""

    target: Network
    config: DecoderConfig

    @classmethod
    def open(cls, target: Network, config: DecoderConfig) -> "MtpFiles":
        json = target.checkpoint.config
        if json.get("model_type") not in WITH_MTP or not json.get("num_nextn_predict_layers"):
            raise StartError(f'the method "mtp": {target.model_id} has no layer for multi-token prediction')
        if target.checkpoint.packed is not None:
            raise StartError('the method "mtp": weights that are stored quantised are not read for it')
        return cls(target, config)

    @property
    def shape(self) -> CacheShape:
        return _shape(self.config, self.target)

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    def check(self) -> list[int]:
        blueprint = MtpHead(self.config, self.target.dtype, torch.device("meta")).checkpoint_tensors()
        self.target.checkpoint.check(blueprint)
        return _sizes([*blueprint.values()])

    def load(self, target: Decoder) -> Head:
        head = MtpHead(self.config, self.target.dtype, self.target.device)
        self.target.checkpoint.load_into(head.checkpoint_tensors())
        head.pack(target)
        return head


@dataclass(frozen=True)
class EagleFiles:
    """An EAGLE-3 head in its own folder."""

    checkpoint: Checkpoint
    weights: WeightFiles | None
    """None for random weights."""
    config: EagleConfig
    target: Network

    @classmethod
    def open(cls, name: str, settings: WorkerSettings, target: Network, of_target: DecoderConfig) -> "EagleFiles":
        is_dummy = settings.load_format == "dummy"
        path = find_model(name, settings.cache.expanduser(), with_weights=not is_dummy).path
        weights = None if is_dummy else WeightFiles(path)
        checkpoint = Checkpoint(path, weights or DummyWeights(target.device))
        if checkpoint.quantization is not None:
            raise StartError(f"{path / 'config.json'}: heads that are stored quantised are not read")
        config = _read_config(checkpoint, of_target, path / "config.json")
        if (size := config.layer.hidden_size) != of_target.hidden_size and not _has(weights, "embed_tokens.weight"):
            raise StartError(
                f"{path}: it has no embed_tokens, and the embeddings of {target.model_id} have "
                f"{of_target.hidden_size} numbers where it needs {size}"
            )
        return cls(checkpoint, weights, config, target)

    @property
    def shape(self) -> CacheShape:
        return _shape(self.config.layer, self.target)

    @property
    def max_model_len(self) -> int:
        return self.config.layer.max_model_len

    def check(self) -> list[int]:
        blueprint = self._allocate(torch.device("meta")).checkpoint_tensors(self._layer_name)
        self.checkpoint.check(blueprint)
        # t2d is not read, because d2t says which tokens have a logit.
        self.checkpoint.check_none_left({*blueprint, "d2t", "t2d"})
        self._token_ids()
        return _sizes([*blueprint.values()])

    def load(self, target: Decoder) -> Head:
        head = self._allocate(self.target.device)
        self.checkpoint.load_into(head.checkpoint_tensors(self._layer_name))
        token_ids = self._token_ids()
        head.pack(None if token_ids is None else token_ids.to(self.target.device), target.embedding)
        return head

    def _allocate(self, device: torch.device) -> EagleHead:
        has_embedding = _has(self.weights, "embed_tokens.weight")
        return EagleHead(self.config, self.target.dtype, device, has_embedding=has_embedding)

    @property
    def _layer_name(self) -> str:
        """One of `_LAYER_NAMES`. If the tensors have both names or neither, the format of config.json decides."""
        first, other = reversed(_LAYER_NAMES) if "transformer_layer_config" in self.checkpoint.config else _LAYER_NAMES
        names = [] if self.weights is None else [*self.weights.dtypes]
        has_first, has_other = (any(name.startswith(f"{layer}.") for name in names) for layer in (first, other))
        return other if has_other and not has_first else first

    def _token_ids(self) -> Tensor | None:
        """The token id of each logit, or None if logit i is token i. `d2t` stores the token id minus the logit's
        index."""
        number, size, path = self.config.draft_vocabulary_size, self.config.layer.vocabulary_size, self.checkpoint.path
        if self.weights is None or not _has(self.weights, "d2t"):
            if number < size and self.weights is not None:
                raise StartError(f"{path}: draft_vocab_size is {number}, and d2t is missing")
            return None if number == size else torch.arange(number)
        if self.weights.dtypes["d2t"] != "I64" or tuple(self.weights.shape("d2t")) != (number,):
            raise StartError(f"{path}: d2t must have {number} whole numbers of 64 bits")
        token_ids = torch.arange(number) + self.weights.read("d2t")
        if len(set(token_ids.tolist())) < number:
            raise StartError(f"{path}: d2t has several logits for a token")
        if token_ids.min() < 0 or token_ids.max() >= size:
            raise StartError(f"{path}: d2t leads beyond the {size} tokens of the model")
        return token_ids


def _read_config(checkpoint: Checkpoint, target: DecoderConfig, file: Path) -> EagleConfig:
    try:
        return EagleConfig.from_json(checkpoint.config, target)
    # Code that reads an untrusted file may raise any exception.
    except Exception as error:
        raise StartError(f"{file}: {reason(error)}") from error


def _has(weights: WeightFiles | None, name: str) -> bool:
    return weights is not None and name in weights.dtypes
