"""Loads a model that generates text: network, KV cache and optional features."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from operator import truediv
from typing import Any

import structlog

from pagewire_common.model_files.generation_config import GenerationConfig, GenerationDefaults
from pagewire_common.start_error import StartError
from worker_service.errors import is_out_of_memory
from worker_service.execution.adapters.adapters import AdapterRoom
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.cache.layer_groups import LayerGroup, group_layers
from worker_service.execution.drafting.proposer_loaders import open_proposer_loader
from worker_service.execution.images.image_encoder import ImageEncoder
from worker_service.execution.loaders.loader import Loader
from worker_service.execution.sampling.alignment import Aligner
from worker_service.execution.sampling.forms import Forms
from worker_service.execution.startup.capacity import blocks_of, count_device_blocks
from worker_service.execution.startup.network import Network
from worker_service.execution.startup.profiling import measure_encoder_decoder, measure_prefill
from worker_service.execution.steps.decode_graphs import capture
from worker_service.execution.steps.encoder_decoder_runner import EncoderDecoderRunner
from worker_service.execution.steps.model_runner import ModelRunner, Runner
from worker_service.models.layer_needs import LayerKeys, LayerNeeds, LayerStates, has_one_kind, needs_of
from worker_service.parallel.ranks import Ranks
from worker_service.progress import stage
from worker_service.session.step import LayerLimits, Limits, WorkerInfo
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Drafter, Proposer

log = structlog.get_logger()


class GeneratorLoader(Loader):
    """Loads the network and its proposer of drafts, and allocates memory for adapters and for KV caches."""

    def __init__(self, settings: WorkerSettings, target: Network) -> None:
        generation = _read_generation_config(target)
        super().__init__(settings, target)
        config, ranks = target.config, target.ranks
        self._aligner = Aligner.read(generation, config) if target.max_encoder_len else None
        window = config.sliding_window
        # A window as long as the longest sequence counts as none.
        self._sliding_window = 0 if window is None or window >= self.max_model_len else window
        self._proposer_loader = open_proposer_loader(settings, target, self.max_model_len, self._sliding_window)
        follows = settings.forms and ranks.size == 1
        # The process for output forms starts while the model is being loaded.
        self._forms = Forms.load(target.tokenizer_files, config.vocabulary_size) if follows else None
        groups = self._groups(needs_of(config, target.shape.num_kv_heads))
        if groups:  # each group has its own window
            self._sliding_window = 0
        self._shapes = [replace(target.shape, groups=groups), *self._proposer_loader.shapes]
        self._block_bytes = ranks.gather_numbers(sum(shape.block_bytes for shape in self._shapes))
        self._room = AdapterRoom(settings.max_loras, settings.max_lora_rank, settings.max_cpu_loras)
        self._num_device_blocks = 0
        self._num_host_blocks = int(settings.swap_space * 2**30) // sum(self._block_bytes)
        self._images: ImageEncoder | None = None
        self._model: Any  # the network's class depends on `config`
        self._cache: CacheEngine
        self._proposer: Proposer | None = None

    def _groups(self, needs: Sequence[LayerNeeds]) -> tuple[LayerGroup, ...]:
        """The groups of layers in the KV cache. Networks that draft have one block table for each sequence, so there
        are no groups beside them. A step has room for the span of the groups' blocks. Raises StartError if the layers'
        needs differ and the settings exclude groups."""
        target, settings, most = self.target, self.settings, self.settings.max_num_batched_tokens
        reason, name = "", target.model_id
        if settings.disable_hybrid_kv_cache_manager:
            reason = f"--disable-hybrid-kv-cache-manager: {name} needs groups of layers in the cache"
        elif settings.speculation is not None and any(isinstance(layer, LayerStates) for layer in needs):
            reason = f"{settings.speculation.flag}: {name} keeps states, which rejected drafts would have changed"
        elif self._proposer_loader.shapes:
            assert settings.speculation is not None
            reason = f"{settings.speculation.flag}: {name} needs groups of layers in the cache"
        else:
            try:
                groups = group_layers(
                    needs, settings.block_size, self.max_model_len, target.dtype, target.shape.dtype, most
                )
            except ValueError as error:
                raise StartError(f"{name} is not supported: {error}") from error
            span = replace(target.shape, groups=groups).span
            if span <= most:
                return groups
            reason = f"--max-num-batched-tokens is {most}; it must be at least {span}, the tokens of a block of {name}"
        if needs and not has_one_kind(needs):
            raise StartError(reason)
        windows = {layer.window for layer in needs if isinstance(layer, LayerKeys)}
        if None in windows and len(windows) > 1:
            log.info("layers with a window keep whole contexts", reason=reason)
        return ()

    def check(self) -> list[int]:
        return [*self.target.check(self._room), self._encoder_cache_bytes, *self._proposer_loader.check()]

    @property
    def _encoder_cache_bytes(self) -> int:
        images, size = self.target.images, self.target.config.hidden_size
        return 0 if images is None else images.cache_bytes(self.settings.encoder_cache_size, size)

    def load(self) -> None:
        self._model, self.adapters = self.target.load(self._room)
        self._images = None if self.target.images is None else self.target.images.load(self.target.device)
        if self.settings.max_loras and not self.adapters.shapes:
            raise StartError(f"--max-loras: {self.target.model_id} has no projection that adapters can be applied to")
        self._proposer_loader.load(self._model)

    def measure(self) -> int:
        shape, device, most_tokens = self._shapes[0], self.target.device, self.settings.max_num_batched_tokens
        if self.target.max_encoder_len:
            speed = measure_encoder_decoder(self._model, shape, device, most_tokens)
        else:
            speed = measure_prefill(self._model, shape, device, most_tokens, self.settings.max_num_seqs)
        self._proposer_loader.measure(speed)
        return speed

    def make_ready(self) -> Runner:
        target, settings = self.target, self.settings
        self._count_blocks()
        counts = self._num_device_blocks, self._num_host_blocks
        self._cache, *others = (CacheEngine(shape, *counts, target.device) for shape in self._shapes)
        for cache in others:
            self._proposer_loader.attach(cache)
        stage("making the cache ready")
        adapts = bool(settings.max_loras)
        graphs = capture(target.config, self._model, self._cache, settings, self.max_model_len, has_adapters=adapts)
        self._proposer = self._proposer_loader.proposer() if target.ranks.rank == 0 else None
        if self._forms is not None and not self._forms.is_ready():
            self._forms = None
        if target.max_encoder_len:
            return EncoderDecoderRunner(self._model, self._cache, self._forms, self.adapters, self._aligner)
        return ModelRunner(self._model, self._cache, graphs, self._forms, self.adapters, self._images)

    def _count_blocks(self) -> None:
        """Choose the number of device blocks. If they are too few for the maximum length, reduce the maximum length."""
        target, settings = self.target, self.settings
        longest = self.max_model_len + target.max_encoder_len
        # With scaled positions, a model may allow sequences too long for a small machine's KV cache.
        least = target.unscaled_len + target.max_encoder_len if settings.max_model_len is None else longest
        self._num_device_blocks = count_device_blocks(
            target.device, self._shapes, longest, self._sliding_window, settings, target.ranks, least
        )
        if self._sliding_window or settings.max_model_len is not None or settings.num_gpu_blocks_override is not None:
            return
        chunk = settings.max_num_batched_tokens
        fitting = bisect_right(
            range(1, longest + 1), self._num_device_blocks, key=lambda n: blocks_of(n, self._shapes[0], 0, chunk)
        )
        found = min(self.max_model_len, max(target.unscaled_len, fitting))
        if found < self.max_model_len:
            log.warning(
                f"texts have at most {found} tokens: the cache has no room for {self.max_model_len}, for which "
                "positions are scaled"
            )
        self.max_model_len = found

    def drafter(self, runner: Runner, speed: int) -> Drafter | None:
        if self._proposer is None:
            return None
        return Drafter(
            self._proposer,
            self.settings.num_drafts,
            self.target.config.vocabulary_size,
            speed,
            runs_ahead=runner.runs_ahead,
        )

    def info(self, fingerprint: str, speed: int) -> WorkerInfo:
        return replace(
            super().info(fingerprint, speed),
            features=self._features(),
            sliding_window=self._sliding_window,
            swap_bytes_per_second=_slowest(self._cache.measure_swap_bandwidth(), self._block_bytes, self.target.ranks),
            block_bytes=sum(self._block_bytes),
            lora_copy_seconds=self.adapters.measure_copy(),
        )

    def _features(self) -> tuple[str, ...]:
        features = []
        if self._num_host_blocks:
            features.append("swap")
        if self._forms is not None:
            features.append("forms")
        if self.target.images is not None:
            features.append("images-ahead")
        if (speculation := self.settings.speculation) is not None:
            features.append(f"speculate:{speculation.method}")
        return tuple(features)

    def limits(self) -> Limits:
        settings, config, max_encoder_len = self.settings, self.target.config, self.target.max_encoder_len
        return replace(
            super().limits(),
            num_device_blocks=self._num_device_blocks,
            num_host_blocks=self._num_host_blocks,
            num_speculative_tokens=settings.num_drafts,
            max_loras=settings.max_loras,
            max_cpu_loras=settings.max_cpu_loras,
            embedding_size=0 if max_encoder_len else config.hidden_size,
            max_encoder_len=max_encoder_len,
            block_size=self._shapes[0].span,
            layer_groups=tuple(
                LayerLimits(group.block_size, group.window, group.chunked) for group in self._shapes[0].groups
            ),
            max_num_encoder_tokens=max(max_encoder_len, settings.max_num_batched_tokens) if max_encoder_len else 0,
            feature_bytes=getattr(config, "feature_bytes", 0),
            aligns=self._aligner is not None,
            prompt_embeds_size=0 if max_encoder_len else self._model.prompt_embeds_size,
            images=None if self.target.images is None else self.target.images.layouts,
            encoder_cache_size=0 if self.target.images is None else settings.encoder_cache_size,
            encoder_budget=settings.encoder_budget,
        )

    def explain(self, error: Exception) -> StartError | None:
        if not is_out_of_memory(error):
            return None
        return StartError(
            f"{self.settings.model} and its cache do not fit into the memory of {self.target.device.type}: "
            f"{str(error).splitlines()[0]}"
        )


def _read_generation_config(target: Network) -> GenerationConfig:
    """Read the checkpoint's sampling defaults, which schedulers use. Raises StartError if they contradict each
    other."""
    found = GenerationConfig.read(target.checkpoint.config, target.checkpoint.generation, target.config.vocabulary_size)
    GenerationDefaults.of(found)
    if target.ranks.rank == 0 and (chosen := found.chosen_by_requests):
        log.info(f"{found.file} prefers a decoding method, which only requests that ask for it get", **chosen)
    return found


def _slowest(bytes_per_second: int, block_bytes: Sequence[int], ranks: Ranks) -> int:
    """Bytes a second of whole blocks. A block is swapped when the slowest rank has moved its part."""
    speeds = ranks.gather_numbers(bytes_per_second)
    return 0 if 0 in speeds else round(sum(block_bytes) / max(map(truediv, block_bytes, speeds)))
