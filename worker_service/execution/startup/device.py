"""Chooses and describes a worker's device, and sets the number of threads."""

import os
import platform
from pathlib import Path

import structlog
import torch

from kernels.backends import EAGER, backend_name
from kernels.cpu.library import what_is_missing
from pagewire_common.start_error import StartError
from worker_service.settings import WorkerSettings

log = structlog.get_logger()


def choose_device(settings: WorkerSettings) -> torch.device:
    """Choose the device of this rank. Raises StartError if the device does not exist."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise StartError("--device cuda: torch finds no usable GPU; install a CUDA build of torch, or use --device cpu")
    if not available or settings.device == "cpu":
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if settings.tensor_parallel_size > count:
        raise StartError(f"--tensor-parallel-size is {settings.tensor_parallel_size}; torch finds {count} GPUs")
    # By default, cuDNN rounds float32 inputs of convolutions to 10 bits: log-probabilities differed by 1e-3.
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", number if settings.tensor_parallel_size > 1 else 0)


def set_threads(settings: WorkerSettings) -> None:
    """Without `--threads`, the ranks of a worker share the cores equally."""
    if settings.threads is not None or settings.tensor_parallel_size > 1:
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // settings.tensor_parallel_size))


def warn_if_eager(device: torch.device) -> None:
    """If compiled kernels are not used on this device, log what is missing for them."""
    if backend_name(device) == EAGER:
        missing = "triton" if device.type == "cuda" else what_is_missing()
        log.warning(f"eager torch computes, more slowly; missing: {missing}")


def describe_device(device: torch.device, num_ranks: int) -> str:
    """Device, kernels and number of ranks, for schedulers and operators."""
    described = f"{device.type} ({_name(device)}, {backend_name(device)})"
    return f"{described} x {num_ranks}" if num_ranks > 1 else described


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
