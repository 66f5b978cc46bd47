"""Measures a device's memory bandwidth by copying a tensor, in a separate process that leaves no memory allocated."""

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from bench.kernels_gpu import copy_bandwidth

NUM_COPIES = 10


def measure_copy(device: str) -> tuple[str, float]:
    """The device's name, and the bytes per second read and written. Raises ValueError for an unknown device."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, device).result()


def _measure(device: str) -> tuple[str, float]:
    if device == "cpu":
        source = torch.arange(2**26, dtype=torch.int32)
        target = torch.empty_like(source)
        ends = [_time_of_copy(source, target) for _ in range(NUM_COPIES)]
        return f"{torch.get_num_threads()} CPU threads", 2 * source.nbytes / statistics.median(ends)
    if not torch.cuda.is_available():
        raise ValueError("torch finds no NVIDIA GPU on this machine; --device cpu tries the program out")
    return torch.cuda.get_device_name(), copy_bandwidth(torch.device(device))


def _time_of_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began
