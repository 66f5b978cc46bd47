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

from kernels.backends import EAGER, backend_name, ops_for
from kernels.cpu.library import what_is_missing
from kernels.reference import INT8_GROUP
from pagewire_common.start_error import StartError
from worker_service.errors import is_out_of_memory
from worker_service.execution.cache_engine import CacheEngine, CacheShape
from worker_service.execution.capacity import check_room_for_weights, count_device_blocks
from worker_service.execution.decode_graphs import DecodeGraphs
from worker_service.execution.forms import Forms
from worker_service.execution.model_runner import ModelRunner
from worker_service.execution.profiling import measure_prefill
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.loading.model_store import find_model
from worker_service.loading.tokenizer_files import find_tokenizer_files
from worker_service.models.causal_model import ModelConfig
from worker_service.models.decoder_config import DecoderConfig
from worker_service.models.registry import AnyConfig, build_model, read_config
from worker_service.models.shard import part_of
from worker_service.parallel.ranks import Ranks, join_ranks
from worker_service.session.step import Limits, WorkerInfo
from worker_service.settings import WorkerSettings
from worker_service.speculation.drafter import Drafter

log = structlog.get_logger()


@dataclass(frozen=True)
class Worker:
    """Everything that serves a session."""

    ranks: Ranks
    info: WorkerInfo
    limits: Limits
    runner: ModelRunner
    tokenizer_files: list[Path]
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
    cache = settings.cache.expanduser()
    is_dummy = settings.load_format == "dummy"
    source = find_model(settings.model, cache, with_weights=not is_dummy)
    checkpoint = Checkpoint(source.path, DummyWeights(device) if is_dummy else None)
    tokenizer_files = find_tokenizer_files(source.path, cache, may_lack=is_dummy)
    config = _read_config(checkpoint)
    follows = settings.forms and ranks.size == 1
    forms = Forms.load(tokenizer_files, config.vocabulary_size) if follows else None  # it starts beside what follows
    max_model_len = _choose_max_model_len(settings, config)
    dtype = checkpoint.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    num_kv_heads, cuts = part_of(config, ranks)
    shape = CacheShape(config.num_layers, settings.block_size, num_kv_heads, config.head_dim, dtype)
    block_bytes = ranks.gather_numbers(shape.block_bytes)
    num_host_blocks = int(settings.swap_space * 2**30) // sum(block_bytes)
    try:
        # First without memory: errors in the weights are found before memory is allocated for them.
        blueprint = build_model(config, dtype, torch.device("meta"), ranks).checkpoint_tensors()
        checkpoint.check(blueprint, cuts)
        check_room_for_weights(device, dtype, [tensor.nbytes for tensor in blueprint.values()], ranks)
        _check_quantization(config, dtype, device, settings)
        # The fingerprint is of the whole model; one rank computes it. Several threads read the files, so that loading
        # finds them in memory. Weights that are rounded in another way count as other weights: workers that round
        # differently do not serve together.
        scheme = f"int8 by {INT8_GROUP}" if settings.quantization == "int8" else settings.quantization
        fingerprint = checkpoint.fingerprint(tokenizer_files, dtype, scheme) if ranks.rank == 0 else ""
        model = build_model(config, dtype, device, ranks)
        checkpoint.load_into(model.checkpoint_tensors(), cuts)
        model.pack(int8=settings.quantization == "int8")
        speed = measure_prefill(model, shape, device, settings.max_num_batched_tokens, settings.max_num_seqs)
        num_device_blocks = count_device_blocks(
            device, shape, max_model_len, _sliding_window(config, max_model_len), settings, ranks
        )
        cache_engine = CacheEngine(shape, num_device_blocks, num_host_blocks, device)
        decode_graphs = None
        captures = isinstance(config, DecoderConfig) and kernels != EAGER and not settings.enforce_eager
        if device.type == "cuda" and captures:
            decode_graphs = DecodeGraphs(model, cache_engine.device_blocks, settings.max_num_seqs, max_model_len)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartError(
            f"{settings.model} and its cache do not fit into the memory of {device.type}: {str(error).splitlines()[0]}"
        ) from error
    if forms is not None and not forms.is_ready():
        forms = None
    return Worker(
        ranks=ranks,
        info=WorkerInfo(
            model_id=source.model_id,
            model_fingerprint=fingerprint,
            dtype=str(dtype).removeprefix("torch."),
            device=f"{device.type} ({_device_name(device)}, {kernels})" + f" x {ranks.size}" * (ranks.size > 1),
            features=(*("swap",) * bool(num_host_blocks), *("forms",) * bool(forms)),
            sliding_window=_sliding_window(config, max_model_len),
            swap_bytes_per_second=_slowest(cache_engine.measure_swap_bandwidth(), block_bytes, ranks),
            prefill_tokens_per_second=speed,
            block_bytes=sum(block_bytes),
        ),
        limits=Limits(
            block_size=settings.block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            vocabulary_size=config.vocabulary_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            num_speculative_tokens=settings.num_speculative_tokens if settings.speculate != "none" else 0,
        ),
        runner=ModelRunner(model, cache_engine, decode_graphs, forms),
        tokenizer_files=tokenizer_files,
        drafter=(
            Drafter(settings.num_speculative_tokens, speed)
            if settings.speculate == "ngram" and ranks.rank == 0
            else None
        ),
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


def _read_config(checkpoint: Checkpoint) -> AnyConfig:
    file = checkpoint.path / "config.json"
    try:
        return read_config(checkpoint.config)
    except KeyError as error:
        raise StartError(f"{file}: {error.args[0]} is missing") from error
    except Exception as error:  # a config is untrusted, and the code that reads it may raise anything
        raise StartError(f"{file}: {str(error) or type(error).__name__}") from error


def _check_quantization(config: AnyConfig, dtype: torch.dtype, device: torch.device, settings: WorkerSettings) -> None:
    """Packs small weights to find out whether such weights can be packed, before any are loaded."""
    if settings.quantization == "none":
        return
    if not isinstance(config, DecoderConfig):
        raise StartError(f"--quantization {settings.quantization} is for the families that run natively")
    if ops_for(device).pack_int8(torch.ones(2, 2, dtype=dtype, device=device)) is None:
        raise StartError(
            f"--quantization {settings.quantization} needs bfloat16, compiled kernels, and a CPU with AVX-512 BF16"
        )


def _choose_max_model_len(settings: WorkerSettings, config: ModelConfig) -> int:
    if settings.max_model_len is None:
        return config.max_model_len
    if settings.max_model_len > config.max_model_len:
        raise StartError(f"--max-model-len is {settings.max_model_len}; the model's limit is {config.max_model_len}")
    return settings.max_model_len


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
