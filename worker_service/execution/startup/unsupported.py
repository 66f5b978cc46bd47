"""Refuses settings that a network does not support. Functions raise StartError."""

from collections.abc import Callable

import torch

from kernels.attention.narrow_cache import SCALE_BYTES, is_narrow
from kernels.backends import EAGER, backend_name
from kernels.float8 import FLOAT8
from pagewire_common.start_error import StartError
from worker_service.execution.cache.cache_engine import CacheShape
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.registry import AnyConfig
from worker_service.parallel.ranks import Ranks


def check_invariance(
    model_id: str, config: AnyConfig, ranks: Ranks, device: torch.device, *, is_narrow_anywhere: bool
) -> None:
    """is_narrow_anywhere: whether weights or cache have another type than --dtype."""
    if not isinstance(config, DecoderConfig):
        raise StartError(f"--batch-invariant is for the families that run natively, not for {model_id}")
    if ranks.size > 2:
        raise StartError(
            f"--tensor-parallel-size is {ranks.size}; with --batch-invariant it is at most 2, because a "
            "library chooses the order in which more processes' sums are added up"
        )
    if backend_name(device) == EAGER:
        raise StartError("--batch-invariant needs compiled kernels, and eager torch computes here")
    if device.type != "cpu" and is_narrow_anywhere:
        raise StartError("--batch-invariant is for weights and caches of --dtype, where a GPU computes")


def check_cache(model_id: str, shape: CacheShape, device: torch.device, has_float8: Callable[[], bool]) -> None:
    """has_float8: whether the device can store fp8 numbers; called only for a cache in fp8."""
    if shape.kv_parts == 1 and is_narrow(shape.dtype):
        raise StartError(
            f"--kv-cache-dtype: {model_id} has latent attention; in 8 bits its latents would share a scale "
            "with the rotated elements, which may be much larger"
        )
    if shape.dtype is FLOAT8 and not has_float8():
        raise StartError("--kv-cache-dtype fp8 is for GPUs of compute capability 8.9 or later; int8 is for all devices")
    if device.type != "cpu" and is_narrow(shape.dtype) and shape.head_dim % SCALE_BYTES:
        raise StartError(
            f"--kv-cache-dtype: {model_id} has heads of {shape.head_dim} numbers, which must be a "
            f"multiple of {SCALE_BYTES} on a GPU"
        )
