"""A checkpoint that has been opened, and what this rank makes of it: a network with its weights on a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from kernels.backends import EAGER, backend_name, ops_for
from kernels.float8 import FLOAT8, FLOAT8_CAPABILITY
from kernels.narrow_cache import SCALE_BYTES, is_narrow
from kernels.reference import W8A8_GROUP, WEIGHT_GROUP
from pagewire_common.start_error import StartError
from worker_service.errors import is_out_of_memory
from worker_service.execution.adapters import AdapterRoom, Adapters
from worker_service.execution.cache_engine import CacheShape
from worker_service.execution.capacity import give_freed_memory_back
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.loading.gguf_blocks import GgufBlocks
from worker_service.loading.model_store import find_model
from worker_service.loading.sentence_files import SentenceSettings
from worker_service.loading.tokenizer_files import find_tokenizer_files
from worker_service.models.causal_model import Loadable
from worker_service.models.decoder_config import DecoderConfig
from worker_service.models.linear import NONE_QUANTIZED, Quantization, Quantized, can_pack, head_quantization
from worker_service.models.registry import AnyConfig, build_encoder, build_encoder_decoder, build_model, read_config
from worker_service.models.shard import part_of
from worker_service.parallel.cut import Cut
from worker_service.parallel.ranks import Ranks
from worker_service.settings import WorkerSettings

log = structlog.get_logger()

NO_ADAPTERS = AdapterRoom()
_CACHE_TYPES = {"int8": torch.int8, "fp8": FLOAT8}
_QUANTIZED_SHARE = 5 / 8
"""Of 16 bits, at most: a number of 8 bits and, for every 16, two of 16 bits. Weights that are read quantised never have
memory as floating point, though room for them is asked for: it is not touched."""


@dataclass(frozen=True)
class Network:
    """Nothing of it is in memory until `load`."""

    model_id: str
    checkpoint: Checkpoint
    tokenizer_files: list[Path]
    config: AnyConfig
    dtype: torch.dtype
    shape: CacheShape
    """Of this rank's part of a block."""
    cuts: Mapping[str, Cut]
    device: torch.device
    ranks: Ranks
    quantization: Quantization
    sentences: SentenceSettings
    batch_invariant: bool = False
    """As `ops_for` has it."""

    @classmethod
    def open(cls, name: str, settings: WorkerSettings, device: torch.device, ranks: Ranks) -> "Network":
        """Find a model, downloading and converting it where needed. Raises StartError."""
        cache, is_dummy = settings.cache.expanduser(), settings.load_format == "dummy"
        source = find_model(name, cache, with_weights=not is_dummy)
        checkpoint = Checkpoint(source.path, DummyWeights(device) if is_dummy else None)
        config = _read_config(checkpoint)
        dtype = checkpoint.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        num_kv_heads, cuts = part_of(config, ranks)
        otherwise = "LAST" if config.num_layers else "MEAN"
        is_classifier = getattr(config, "num_labels", 0) > 0
        return cls(
            source.model_id,
            checkpoint,
            find_tokenizer_files(source.path, cache, may_lack=is_dummy),
            config,
            dtype,
            CacheShape(
                config.num_layers,
                settings.block_size,
                num_kv_heads,
                config.head_dim,
                _CACHE_TYPES.get(settings.kv_cache_dtype, dtype),
            ),
            cuts,
            device,
            ranks,
            settings.quantization,
            # A classifier makes no vectors, whatever the files beside it say.
            SentenceSettings(otherwise) if is_classifier else SentenceSettings.read(source.path, otherwise),
            settings.batch_invariant,
        )

    @property
    def is_encoder(self) -> bool:
        """Whether it reads texts whole and keeps no keys and values."""
        return self.config.num_layers == 0

    @property
    def max_encoder_len(self) -> int:
        """Tokens that an encoder beside the decoder reads; 0 without one."""
        return getattr(self.config, "max_encoder_len", 0)

    def check(self, room: AdapterRoom = NO_ADAPTERS) -> list[int]:
        """The bytes that each of its tensors takes at most. Raises StartError where they cannot be loaded; allocates no
        memory.

        room: for adapters, which counts as well.
        """
        model = self._build(torch.device("meta"))
        blueprint = model.checkpoint_tensors()
        self.checkpoint.check(blueprint, self.cuts)
        if self.batch_invariant:
            self._check_invariance()
        self._check_quantization()
        self._check_cache()
        widened = _widened(blueprint, self._quantized())
        share = 1 if self._is_stored_in_fp8 else _QUANTIZED_SHARE
        sizes = (t.nbytes if name in widened else t.nbytes * share for name, t in blueprint.items())
        return [*map(int, sizes), Adapters(model, room).num_bytes]

    def _build(self, device: torch.device) -> Loadable:
        if self.is_encoder or self.max_encoder_len:
            build = build_encoder if self.is_encoder else build_encoder_decoder
            try:
                return build(self.config, self.dtype, device)
            except Exception as error:  # its code takes any value, until one makes no sense
                if is_out_of_memory(error):
                    raise
                file = self.checkpoint.path / "config.json"
                raise StartError(f"{file} describes no network: {type(error).__name__}: {error}") from error
        return build_model(self.config, self.dtype, device, self.ranks, batch_invariant=self.batch_invariant)

    def fingerprint(self) -> str:
        """Of the whole model, whatever this rank's part is. Several threads read the files, so that loading finds them
        in memory.

        Weights that are rounded in another way count as other weights: workers that round differently do not serve
        together.
        """
        scheme: str = self.quantization
        if self.quantization != "none":
            head = head_quantization(self.device, self.dtype, self.quantization)
            group = {"fp8": "output", "w8a8": W8A8_GROUP}.get(self.quantization, WEIGHT_GROUP)
            scheme += f" by {group}" if head == self.quantization else f" by {group}, head {head}"
        if self.quantization == "gguf":
            scheme += f" with units {GgufBlocks(self.checkpoint.path).digest()}"
        if self._packs_stored:
            scheme = f"as stored, inputs by {WEIGHT_GROUP} and {W8A8_GROUP}"
        if self.shape.dtype is not self.dtype:
            scheme += f", {self.shape.dtype} cache"
        if self.batch_invariant:
            scheme += ", batch-invariant"
        if (self.checkpoint.path / "modules.json").is_file():
            scheme += f" {self.sentences}"
        return self.checkpoint.fingerprint(self.tokenizer_files, self.dtype, scheme)

    def load(self, room: AdapterRoom = NO_ADAPTERS) -> tuple[Any, Adapters]:
        """The network, of the kind that `config` says. Raises StartError, and what torch raises where there is no room
        for it."""
        model = self._build(self.device)
        quantized = self._quantized()
        self.checkpoint.load_into(_widened(model.checkpoint_tensors(), quantized), self.cuts)
        adapters = Adapters(model, room, self.cuts)
        try:
            model.pack(self.quantization, quantized)
        except ValueError as error:
            which = f"--quantization {self.quantization}" if self.checkpoint.packed is None else self.checkpoint.path
            raise StartError(f"{which}: {error}") from error
        give_freed_memory_back()
        return model, adapters

    @property
    def _packs_stored(self) -> bool:
        """Whether weights that are stored quantised are multiplied as they are, rather than widened."""
        if self.checkpoint.packed is None or not isinstance(self.config, DecoderConfig):
            return False
        return all(self._can_pack(scheme) for scheme in self.checkpoint.packed.schemes)

    def _can_pack(self, scheme: Quantization) -> bool:
        """Of a network that runs natively."""
        assert isinstance(self.config, DecoderConfig)
        if ops_for(self.device).GROUPED_PRODUCTS and any(layer.mixture for layer in self.config.layers):
            return False  # experts that are multiplied in one launch stay as they are
        return can_pack(self.device, self.dtype, scheme)

    def _quantized(self) -> Quantized:
        if self._packs_stored and self.checkpoint.packed is not None:
            return self.checkpoint.packed
        return GgufBlocks(self.checkpoint.path) if self.quantization == "gguf" else NONE_QUANTIZED

    @property
    def _is_stored_in_fp8(self) -> bool:
        return self.checkpoint.packed is not None and "fp8" in self.checkpoint.packed.schemes

    def _check_invariance(self) -> None:
        if not isinstance(self.config, DecoderConfig):
            raise StartError(f"--batch-invariant is for the families that run natively, and {self.model_id} is of none")
        if self.ranks.size > 2:
            raise StartError(
                f"--tensor-parallel-size is {self.ranks.size}; with --batch-invariant it is at most 2, because a "
                "library chooses the order in which more processes' sums are added up"
            )
        if backend_name(self.device) == EAGER:
            raise StartError("--batch-invariant needs compiled kernels, and eager torch computes here")
        is_narrow_anywhere = self.quantization != "none" or self._is_stored_in_fp8 or self.shape.dtype is not self.dtype
        if self.device.type != "cpu" and is_narrow_anywhere:
            raise StartError("--batch-invariant is for weights and caches of --dtype, where a GPU computes")

    def _check_cache(self) -> None:
        if self.shape.dtype is FLOAT8 and (
            self.device.type == "cpu" or torch.cuda.get_device_capability(self.device) < FLOAT8_CAPABILITY
        ):
            raise StartError(
                "--kv-cache-dtype fp8 is for GPUs of compute capability 8.9 or later; int8 is for all devices"
            )
        if self.device.type != "cpu" and is_narrow(self.shape.dtype) and self.shape.head_dim % SCALE_BYTES:
            raise StartError(
                f"--kv-cache-dtype: {self.model_id} has heads of {self.shape.head_dim} numbers, which must be a "
                f"multiple of {SCALE_BYTES} on a GPU"
            )

    def _check_quantization(self) -> None:
        """Packs small weights to find out whether such weights can be packed, before any are loaded."""
        if self.checkpoint.packed is not None:
            if self.quantization != "none":
                raise StartError(
                    f"--quantization {self.quantization}: those of {self.model_id} are stored quantised already"
                )
            if self.ranks.size > 1:
                raise StartError("--tensor-parallel-size: weights that are stored quantised cannot be cut")
            if (family := self.checkpoint.config.get("model_type")) in _TRANSPOSED:
                raise StartError(
                    f"weights of {family} that are stored quantised are not read: its layers are transposed"
                )
            if not self._packs_stored:
                log.warning(f"the quantised weights are widened to {self.dtype}: these kernels do not multiply by them")
        if self.quantization == "none":
            return
        if not isinstance(self.config, DecoderConfig):
            raise StartError(f"--quantization {self.quantization} is for the families that run natively")
        if self.quantization in ("fp8", "w8a8") and self.ranks.size > 1:
            raise StartError(
                f"--quantization {self.quantization} is for workers of one process: parts of a row would have other "
                "scales"
            )
        if not self._can_pack(self.quantization):
            if self.quantization == "fp8":
                raise StartError("--quantization fp8 on a GPU is for models without experts")
            machine = "a CPU with AVX-512 BF16" if self.quantization == "int8" else "a CPU"
            raise StartError(f"--quantization {self.quantization} needs bfloat16, compiled kernels, and {machine}")
        if self.quantization == "gguf":
            GgufBlocks(self.checkpoint.path)
            if self.ranks.size > 1:
                raise StartError("--quantization gguf is for workers of one process: its blocks cannot be cut")


_TRANSPOSED = ("gpt2", "openai-gpt")
"""Families whose layers are stored as [inputs, outputs], and quantised the other way around."""


def _widened(tensors: Mapping[str, torch.Tensor], quantized: Quantized) -> dict[str, torch.Tensor]:
    """Those that are needed in floating point: all but matrices."""
    return {name: tensor for name, tensor in tensors.items() if name not in quantized or tensor.dim() != 2}


def _read_config(checkpoint: Checkpoint) -> AnyConfig:
    file = checkpoint.path / "config.json"
    try:
        return read_config(checkpoint.config)
    except KeyError as error:
        raise StartError(f"{file}: {error.args[0]} is missing") from error
    except Exception as error:  # a config is untrusted, and the code that reads it may raise anything
        raise StartError(f"{file}: {str(error) or type(error).__name__}") from error
