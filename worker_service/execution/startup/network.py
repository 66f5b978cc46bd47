"""Opens and checks a checkpoint, and loads the part of the network that this rank computes."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
import torch

from kernels.backends import ops_for
from kernels.float8 import FLOAT8, FLOAT8_CAPABILITY
from kernels.linear.quantization import W8A8_GROUP, WEIGHT_GROUP
from pagewire_common.start_error import StartError
from worker_service.errors import is_out_of_memory
from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.execution.cache.cache_engine import CacheShape
from worker_service.execution.startup.capacity import give_freed_memory_back
from worker_service.execution.startup.image_network import ImageNetwork
from worker_service.execution.startup.unsupported import check_cache, check_invariance
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.loading.gguf.blocks import GgufBlocks
from worker_service.loading.model_store import find_model
from worker_service.loading.quantized.packed_weights import PackedWeights
from worker_service.loading.quantized.stacked_experts import MxFloat4Experts
from worker_service.loading.sentence_files import SentenceSettings
from worker_service.loading.tokenizer_files import check_tokenizer, find_tokenizer_files
from worker_service.models.causal_model import Fill, Loadable
from worker_service.models.config.text_part import TENSORS_OF_IMAGES
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.shard import part_of
from worker_service.models.layers.latent_up import WithoutLatentUp
from worker_service.models.layers.linear import NONE_QUANTIZED, Quantization, Quantized, can_pack, head_quantization
from worker_service.models.registry import AnyConfig, build_encoder, build_encoder_decoder, build_model, read_config
from worker_service.parallel.cut import Cut
from worker_service.parallel.ranks import Ranks
from worker_service.progress import byte_progress
from worker_service.settings import WorkerSettings

log = structlog.get_logger()

NO_ADAPTERS = AdapterRoom()
_CACHE_TYPES = {"int8": torch.int8, "fp8": FLOAT8}
_QUANTIZED_SHARE = 5 / 8
"""Bytes of a weight quantised to 8 bits, as a share of 16 bits: at most two 16-bit scales for 16 numbers."""
_INT4_SHARE = 3 / 8
"""Bytes of a weight quantised to 4 bits, as a share of 16 bits: at most two 16-bit scales for 32 numbers."""
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True)
class Network:
    """The files and properties of an opened model. Only `load` allocates memory for weights."""

    model_id: str
    checkpoint: Checkpoint
    tokenizer_files: list[Path]
    config: AnyConfig
    dtype: torch.dtype
    shape: CacheShape
    """This rank's part of a KV cache block."""
    cuts: Mapping[str, Cut]
    device: torch.device
    ranks: Ranks
    quantization: Quantization
    sentences: SentenceSettings
    batch_invariant: bool = False
    """Whether the bits of a row's result do not depend on the other rows of the batch."""
    images: ImageNetwork | None = None
    """None if prompts cannot contain images."""

    @classmethod
    def open(cls, name: str, settings: WorkerSettings, device: torch.device, ranks: Ranks) -> "Network":
        """Find and open a model; download and convert it if necessary. Raises StartError if the model cannot run."""
        cache, is_dummy = settings.cache.expanduser(), settings.load_format == "dummy"
        source = find_model(name, cache, with_weights=not is_dummy)
        checkpoint = Checkpoint(source.path, DummyWeights(device) if is_dummy else None)
        config = _read_config(checkpoint)
        config = config.untied(checkpoint.own(config.tied))
        dtype = checkpoint.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        num_kv_heads, cuts = part_of(config, ranks)
        otherwise = "LAST" if config.num_layers else "MEAN"
        tokenizer_files = find_tokenizer_files(source.path, cache, may_lack=is_dummy)
        check_tokenizer(tokenizer_files, config.vocabulary_size)
        return cls(
            source.model_id,
            checkpoint,
            tokenizer_files,
            config,
            dtype,
            CacheShape(
                config.num_layers,
                settings.block_size,
                num_kv_heads,
                config.head_dim,
                _CACHE_TYPES.get(settings.kv_cache_dtype, dtype),
                kv_parts=config.kv_parts,
                state_dtype=dtype,
            ),
            cuts,
            device,
            ranks,
            settings.quantization,
            SentenceSettings.read(source.path, otherwise, checkpoint.config, getattr(config, "num_labels", 0)),
            settings.batch_invariant,
            ImageNetwork.open(checkpoint, tokenizer_files, dtype) if settings.encoder_cache_size else None,
        )

    @property
    def is_encoder(self) -> bool:
        """Whether the network reads whole texts and has no KV cache."""
        return self.config.num_layers == 0

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence. The files of a sentence-transformers model may allow fewer than config.json."""
        return min(self.config.max_model_len, self.sentences.max_length or self.config.max_model_len)

    @property
    def unscaled_len(self) -> int:
        """Maximum tokens without scaling of positions: `max_position_embeddings` of config.json."""
        stated = self.checkpoint.config.get("max_position_embeddings")
        return min(self.config.max_model_len, stated or self.config.max_model_len)

    @property
    def max_encoder_len(self) -> int:
        """Maximum tokens of an encoder input of an encoder-decoder, or 0."""
        return getattr(self.config, "max_encoder_len", 0)

    def check(self, room: AdapterRoom = NO_ADAPTERS) -> list[int]:
        """Check the weights without allocating memory. Returns the maximum bytes of each weight, and of the slots for
        adapters. Raises StartError if the weights cannot be loaded."""
        model = self._build(torch.device("meta"))
        blueprint, images, ignored = (
            model.checkpoint_tensors(),
            dict[str, torch.Tensor](),
            {*self.config.ignored_tensors},
        )
        if self.images is not None:
            images = self.images.build(torch.device("meta")).checkpoint_tensors()
            ignored -= {*TENSORS_OF_IMAGES}
        self.checkpoint.check(blueprint | images, self.cuts)
        self.checkpoint.check_none_left({*blueprint, *images, *self.config.tied}, ignored)
        if self.batch_invariant:
            check_invariance(
                self.model_id, self.config, self.ranks, self.device, is_narrow_anywhere=self._is_narrow_anywhere
            )
        self._check_quantization()
        check_cache(self.model_id, self.shape, self.device, lambda: self._has_float8)
        return [
            *self._sizes(blueprint),
            *(tensor.nbytes for tensor in images.values()),
            Adapters(model, room).num_bytes,
        ]

    def _sizes(self, blueprint: Mapping[str, torch.Tensor]) -> list[int]:
        """Maximum bytes of each packed tensor and, if tensors are quantised while loading, of one layer before
        quantisation."""
        stored, floats = self._quantized(), defaultdict[str, list[int]](list)
        packed = self.checkpoint.packed
        share = _INT4_SHARE if self.quantization == "int4" else _QUANTIZED_SHARE if packed is None else packed.share
        block = None if packed is None else packed.block
        widens = (self.quantization == "fp8" or self._is_stored_in_fp8) and not self._has_float8
        sizes = []
        for name, tensor in blueprint.items():
            layer = _LAYER.match(name)
            packs = self.quantization not in ("none", "gguf") and layer is not None
            if layer is not None and packs:
                floats[layer[0]].append(tensor.nbytes)
            is_narrow = tensor.dim() == 2 and (packs or name in stored) and not widens
            num_scales = tensor.numel() // block[1] if block is not None and name in stored else 0
            sizes.append(int(tensor.nbytes * (share if is_narrow else 1)) + 4 * num_scales)
        return [*sizes, *max(floats.values(), key=sum, default=[])]

    def _build(self, device: torch.device, fill: Fill | None = None) -> Loadable:
        if self.is_encoder or self.max_encoder_len:
            build = build_encoder if self.is_encoder else build_encoder_decoder
            try:
                return build(self.config, self.dtype, device)
            # For impossible values in config.json, transformers may raise errors of any type.
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                file = self.checkpoint.path / "config.json"
                raise StartError(f"{file} describes no network: {type(error).__name__}: {error}") from error
        return build_model(self.config, self.dtype, device, self.ranks, batch_invariant=self.batch_invariant, fill=fill)

    def fingerprint(self) -> str:
        """A hash of model and quantisation, equal in all ranks. One scheduler never uses workers with different
        fingerprints.

        Several threads read the weight files, which leaves them in the page cache for loading."""
        scheme: str = self.quantization
        if self.quantization != "none":
            head = head_quantization(self.device, self.dtype, self.quantization)
            group = {"fp8": "output", "w8a8": W8A8_GROUP}.get(self.quantization, WEIGHT_GROUP)
            scheme += f" by {group}" if head == self.quantization else f" by {group}, head {head}"
        if self.quantization == "gguf":
            scheme += f" with units {self._gguf_blocks.digest()}"
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
        """Load the weights and allocate the slots for adapters. The network's class depends on `config`. Raises
        StartError, and torch's errors if memory runs out."""
        quantized = self._quantized()
        with byte_progress("loading weights") as progress:

            def fill(places: Mapping[str, torch.Tensor]) -> None:
                give_freed_memory_back()  # frees memory of the last layer
                self.checkpoint.load_into(places, self.cuts)
                progress.update(sum(place.nbytes for place in places.values()))

            model = self._build(self.device, fill)
            tensors = _widened(model.checkpoint_tensors(), quantized)
            progress.reset(sum(tensor.nbytes for tensor in tensors.values()))
            fill({name: tensor for name, tensor in tensors.items() if not tensor.is_meta})
            adapters = Adapters(model, room, self.cuts)
            try:
                model.pack(self.quantization, quantized)
            except ValueError as error:
                which = self.checkpoint.path if self.checkpoint.packed else f"--quantization {self.quantization}"
                raise StartError(f"{which}: {error}") from error
        give_freed_memory_back()
        return model, adapters

    @property
    def _packs_stored(self) -> bool:
        """Whether kernels multiply by the quantised weights as stored. Otherwise, weights are converted to floating
        point."""
        packed = self.checkpoint.packed
        if packed is None or not isinstance(self.config, DecoderConfig):
            return False
        if self._stacks_experts and (packed.stores_input_scales or not self._has_whole_stacks(packed)):
            return False
        return all(self._can_pack(scheme) for scheme in packed.schemes)

    @property
    def _stacks_experts(self) -> bool:
        """Whether the network has experts whose products are one launch for each layer."""
        assert isinstance(self.config, DecoderConfig)
        return ops_for(self.device).GROUPED_PRODUCTS and any(layer.mixture for layer in self.config.layers)

    def _has_whole_stacks(self, packed: PackedWeights | MxFloat4Experts) -> bool:
        """Whether in each layer all experts are stored quantised, or none."""
        assert isinstance(self.config, DecoderConfig)
        counts = Counter(found[0] for name in packed if ".experts." in name and (found := _LAYER.match(name)))
        mixtures = {f"model.layers.{n}.": layer.mixture for n, layer in enumerate(self.config.layers) if layer.mixture}
        return all(
            counts[name] in (0, (1 + len(mixture.names.gate_up)) * mixture.num_experts)
            for name, mixture in mixtures.items()
        )

    def _can_pack(self, scheme: Quantization) -> bool:
        """Whether weights can be packed in this scheme."""
        if self._stacks_experts and not (scheme == "fp8" and self._has_float8):
            return False
        return can_pack(self.device, self.dtype, scheme)

    def _quantized(self) -> Quantized:
        if self._packs_stored and self.checkpoint.packed is not None:
            return WithoutLatentUp(self.checkpoint.packed)
        return self._gguf_blocks if self.quantization == "gguf" else NONE_QUANTIZED

    @cached_property
    def _gguf_blocks(self) -> GgufBlocks:
        return GgufBlocks(self.checkpoint.path)

    @property
    def _is_stored_in_fp8(self) -> bool:
        return self.checkpoint.packed is not None and "fp8" in self.checkpoint.packed.schemes

    @property
    def _is_narrow_anywhere(self) -> bool:
        """Whether weights or cache have another type than `dtype`."""
        return self.quantization != "none" or self._is_stored_in_fp8 or self.shape.dtype is not self.dtype

    @property
    def _has_float8(self) -> bool:
        """Whether the device can store fp8 numbers and multiply them."""
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= FLOAT8_CAPABILITY

    def _check_quantization(self) -> None:
        """Raise StartError if the requested quantisation is not supported. Small weights are packed as a trial."""
        if self.checkpoint.packed is not None:
            if self.quantization != "none":
                raise StartError(
                    f"--quantization {self.quantization}: the weights of {self.model_id} are already quantised"
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
                raise StartError(
                    "--quantization fp8 of experts is for CPUs and GPUs of compute capability 8.9 or later"
                )
            machine = "a CPU with AVX-512 BF16" if self.quantization == "int8" else "a CPU"
            raise StartError(f"--quantization {self.quantization} needs bfloat16, compiled kernels, and {machine}")
        if self.quantization == "gguf" and self.ranks.size > 1:
            raise StartError("--quantization gguf is for workers of one process: its blocks cannot be cut")


_TRANSPOSED = ("gpt2", "openai-gpt")
"""Families with transposed weights, [inputs, outputs]. Quantised checkpoints are refused, because scales lie along the
wrong dimension."""


def _widened(tensors: Mapping[str, torch.Tensor], quantized: Quantized) -> dict[str, torch.Tensor]:
    """The tensors to load in floating point: all but matrices that are stored quantised."""
    return {name: tensor for name, tensor in tensors.items() if name not in quantized or tensor.dim() != 2}


def _read_config(checkpoint: Checkpoint) -> AnyConfig:
    file = checkpoint.path / "config.json"
    try:
        return read_config(checkpoint.config)
    # Code that reads an untrusted file may raise any exception.
    except Exception as error:
        raise StartError(f"{file}: {str(error) or type(error).__name__}") from error
