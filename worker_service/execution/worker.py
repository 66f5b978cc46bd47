"""A loaded worker: from settings to a model with its cache on a device, and what there is to know about it.

Loading and stepping both happen on the one thread that owns the device.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path

import structlog
import torch

from kernels.backends import EAGER, backend_name
from kernels.cpu.library import what_is_missing
from pagewire_common.model_files.generation_config import GenerationConfig, GenerationDefaults
from pagewire_common.start_error import StartError
from worker_service.errors import is_out_of_memory
from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.drafting.guessing import open_guesser
from worker_service.execution.sampling.alignment import Aligner
from worker_service.execution.sampling.forms import Forms
from worker_service.execution.startup.capacity import check_room_for_weights, count_device_blocks
from worker_service.execution.startup.network import Network
from worker_service.execution.startup.profiling import measure_encoder, measure_encoder_decoder, measure_prefill
from worker_service.execution.steps.decode_graphs import capture
from worker_service.execution.steps.encoder_decoder_runner import EncoderDecoderRunner
from worker_service.execution.steps.encoder_runner import EncoderRunner
from worker_service.execution.steps.model_runner import ModelRunner, Runner
from worker_service.models.causal_model import ModelConfig
from worker_service.parallel.ranks import Ranks, join_ranks
from worker_service.progress import stage
from worker_service.session.step import Limits, PoolingType, WorkerInfo
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Drafter

log = structlog.get_logger()


@dataclass(frozen=True)
class Worker:
    """Everything that serves a session."""

    ranks: Ranks
    info: WorkerInfo
    limits: Limits
    runner: Runner
    tokenizer_files: list[Path]
    adapters: Adapters
    drafter: Drafter | None = None


def load_worker(settings: WorkerSettings) -> Worker:
    """Find, load and measure the model, and give the memory that is left to its cache. Raises StartError.

    Where several ranks share the model, all of them load it together.
    """
    device = _choose_device(settings)
    if settings.threads is not None or settings.tensor_parallel_size > 1:
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // settings.tensor_parallel_size))
    ranks = join_ranks(settings.tensor_parallel_size, device)
    kernels = backend_name(device)
    if kernels == EAGER:
        missing = "triton" if device.type == "cuda" else what_is_missing()
        log.warning(f"eager torch computes, more slowly; missing: {missing}")
    target = Network.open(settings.model, settings, device, ranks)
    if target.is_encoder:
        return _load_encoder(settings, target, kernels)
    config, tokenizer_files = target.config, target.tokenizer_files
    generation = GenerationConfig.read(target.checkpoint.config, target.checkpoint.generation, config.vocabulary_size)
    GenerationDefaults.of(generation)  # schedulers take them; here contradictions are found
    if ranks.rank == 0 and (chosen := generation.chosen_by_requests):
        log.info(f"{generation.file} prefers a decoding method that requests have if they ask for it", **chosen)
    aligner = Aligner.read(generation, config) if target.max_encoder_len else None
    max_model_len = _choose_max_model_len(settings, target.max_model_len)
    max_num_encoder_tokens = (
        max(target.max_encoder_len, settings.max_num_batched_tokens) if target.max_encoder_len else 0
    )
    sliding_window = _sliding_window(config, max_model_len)
    guesser = open_guesser(settings, target, max_model_len, sliding_window)
    follows = settings.forms and ranks.size == 1
    forms = Forms.load(tokenizer_files, config.vocabulary_size) if follows else None  # it starts beside what follows
    shapes = [target.shape, *guesser.shapes]
    block_bytes = ranks.gather_numbers(sum(shape.block_bytes for shape in shapes))
    num_host_blocks = int(settings.swap_space * 2**30) // sum(block_bytes)
    try:
        # First without memory: errors in the weights are found before memory is allocated for them.
        room = AdapterRoom(settings.max_loras, settings.max_lora_rank, settings.max_cpu_loras)
        stage("checking weights")
        sizes = target.check(room) + guesser.check()
        check_room_for_weights(device, target.dtype, sizes, ranks)
        stage("fingerprinting weights")
        fingerprint = target.fingerprint() if ranks.rank == 0 else ""  # a draft model chooses no token
        stage("loading weights")
        model, adapters = target.load(room)
        if settings.max_loras and not adapters.shapes:
            raise StartError(f"--max-loras: {target.model_id} has no projection that adapters can be applied to")
        guesser.load(model)
        stage("measuring the largest step")
        if target.max_encoder_len:
            speed = measure_encoder_decoder(model, target.shape, device, settings.max_num_batched_tokens)
        else:
            speed = measure_prefill(model, target.shape, device, settings.max_num_batched_tokens, settings.max_num_seqs)
        guesser.measure(speed)
        longest = max_model_len + target.max_encoder_len
        # Scaled positions may be for far longer texts than a small machine has a cache for.
        least = target.unscaled_len + target.max_encoder_len if settings.max_model_len is None else longest
        num_device_blocks = count_device_blocks(device, shapes, longest, sliding_window, settings, ranks, least)
        if not sliding_window:
            max_model_len = _within_the_cache(target, settings, max_model_len, num_device_blocks * settings.block_size)
        caches = [CacheEngine(shape, num_device_blocks, num_host_blocks, device) for shape in shapes]
        for cache in caches[1:]:
            guesser.attach(cache)
        stage("making the cache ready")
        graphs = capture(config, model, caches[0], settings, max_model_len, has_adapters=bool(settings.max_loras))
        proposer = guesser.proposer() if ranks.rank == 0 else None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartError(
            f"{settings.model} and its cache do not fit into the memory of {device.type}: {str(error).splitlines()[0]}"
        ) from error
    if forms is not None and not forms.is_ready():
        forms = None
    runner = (
        EncoderDecoderRunner(model, caches[0], forms, adapters, aligner)
        if target.max_encoder_len
        else ModelRunner(model, caches[0], graphs, forms, adapters)
    )
    speculation = settings.speculation
    num_guesses = speculation.num_speculative_tokens if speculation is not None else 0
    drafter = None
    if proposer is not None:
        drafter = Drafter(
            proposer,
            num_guesses,
            config.vocabulary_size,
            speed,
            runs_ahead=runner.runs_ahead,
        )
    return Worker(
        ranks=ranks,
        info=WorkerInfo(
            model_id=target.model_id,
            model_fingerprint=fingerprint,
            dtype=str(target.dtype).removeprefix("torch."),
            device=f"{device.type} ({_device_name(device)}, {kernels})" + f" x {ranks.size}" * (ranks.size > 1),
            features=(
                *("swap",) * bool(num_host_blocks),
                *("forms",) * bool(forms),
                *((f"speculate:{speculation.method}",) if speculation is not None else ()),
            ),
            sliding_window=sliding_window,
            swap_bytes_per_second=_slowest(caches[0].measure_swap_bandwidth(), block_bytes, ranks),
            prefill_tokens_per_second=speed,
            block_bytes=sum(block_bytes),
            lora_copy_seconds=adapters.measure_copy(),
            pooling_type=PoolingType[target.sentences.pooling],
            normalizes=target.sentences.normalizes,
        ),
        limits=Limits(
            block_size=settings.block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            vocabulary_size=config.vocabulary_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            num_speculative_tokens=num_guesses,
            max_loras=settings.max_loras,
            max_cpu_loras=settings.max_cpu_loras,
            embedding_size=0 if target.max_encoder_len else config.hidden_size,
            max_encoder_len=target.max_encoder_len,
            max_num_encoder_tokens=max_num_encoder_tokens,
            feature_bytes=getattr(config, "feature_bytes", 0),
            aligns=aligner is not None,
        ),
        runner=runner,
        tokenizer_files=tokenizer_files,
        adapters=adapters,
        drafter=drafter,
    )


def _load_encoder(settings: WorkerSettings, target: Network, kernels: str) -> Worker:
    """The same for an encoder, which has neither a cache nor anything that is for sampling. Raises StartError."""
    for name, is_set in (
        ("--speculative-config", settings.speculative_config is not None),
        ("--max-loras", settings.max_loras > 0),
        ("--num-gpu-blocks-override", settings.num_gpu_blocks_override is not None),
        ("--kv-cache-dtype", settings.kv_cache_dtype != "auto"),
    ):
        if is_set:
            raise StartError(f"{name} is for models that generate text; {target.model_id} is an encoder")
    config, device, sentences = target.config, target.device, target.sentences
    max_model_len = _choose_max_model_len(settings, target.max_model_len)
    if settings.max_num_batched_tokens < max_model_len:
        raise StartError(
            f"--max-num-batched-tokens is {settings.max_num_batched_tokens}; an encoder computes a text whole, and "
            f"{target.model_id} reads up to {max_model_len} tokens: raise it, or lower --max-model-len"
        )
    try:
        check_room_for_weights(device, target.dtype, target.check())
        stage("fingerprinting weights")
        fingerprint = target.fingerprint()
        stage("loading weights")
        model, adapters = target.load()
        num_labels = model.config.num_labels
        runner = EncoderRunner(model, device)
        speed = measure_encoder(runner, max_model_len, settings.max_num_batched_tokens, num_labels)
    except StartError:
        raise
    except Exception as error:  # the network's own code, given values that were never tried
        if is_out_of_memory(error):
            raise StartError(f"{settings.model} does not fit into the memory of {device.type}") from error
        raise StartError(f"{settings.model} cannot be computed: {type(error).__name__}: {error}") from error
    return Worker(
        ranks=target.ranks,
        info=WorkerInfo(
            model_id=target.model_id,
            model_fingerprint=fingerprint,
            dtype=str(target.dtype).removeprefix("torch."),
            device=f"{device.type} ({_device_name(device)}, {kernels})",
            features=(),
            sliding_window=0,
            swap_bytes_per_second=0,
            prefill_tokens_per_second=speed,
            block_bytes=0,
            pooling_type=None if num_labels else PoolingType[sentences.pooling],
            normalizes=sentences.normalizes,
        ),
        limits=Limits(
            block_size=settings.block_size,
            num_device_blocks=0,
            num_host_blocks=0,
            vocabulary_size=config.vocabulary_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            embedding_size=0 if num_labels else config.hidden_size,
            num_labels=num_labels,
        ),
        runner=runner,
        tokenizer_files=target.tokenizer_files,
        adapters=adapters,
    )


def _choose_device(settings: WorkerSettings) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise StartError("--device cuda: torch finds no usable GPU; install a CUDA build of torch, or use --device cpu")
    if not available or settings.device == "cpu":
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if settings.tensor_parallel_size > count:
        raise StartError(f"--tensor-parallel-size is {settings.tensor_parallel_size}; torch finds {count} GPUs")
    return torch.device("cuda", number if settings.tensor_parallel_size > 1 else 0)


def _choose_max_model_len(settings: WorkerSettings, most: int) -> int:
    if settings.max_model_len is None:
        return most
    if settings.max_model_len > most:
        raise StartError(f"--max-model-len is {settings.max_model_len}; the model's limit is {most}")
    return settings.max_model_len


def _within_the_cache(target: Network, settings: WorkerSettings, max_model_len: int, num_tokens: int) -> int:
    """The default of the longest text, where positions are scaled for longer ones than a cache of so many tokens."""
    if settings.max_model_len is not None or settings.num_gpu_blocks_override is not None:
        return max_model_len
    found = min(max_model_len, max(target.unscaled_len, num_tokens))
    if found < max_model_len:
        log.warning(
            f"texts have at most {found} tokens: the cache has no room for {max_model_len}, for which "
            "positions are scaled"
        )
    return found


def _sliding_window(config: ModelConfig, max_model_len: int) -> int:
    """The window, if it is shorter than the longest sequence; otherwise 0, which lets the scheduler cache prefixes."""
    window = config.sliding_window
    return 0 if window is None or window >= max_model_len else window


def _slowest(bytes_per_second: int, block_bytes: Sequence[int], ranks: Ranks) -> int:
    """Bytes a second of whole blocks; a block has moved when every rank has moved its part."""
    speeds = ranks.gather_numbers(bytes_per_second)
    return 0 if 0 in speeds else round(sum(block_bytes) / max(map(truediv, block_bytes, speeds)))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
