"""Compares paged attention with the limits of a GPU: python -m bench.kernels_gpu. The last line is JSON.

In one run, with only torch and triton, and 32 query heads over 8 key heads of 128 in bf16:

- the GPU's copy bandwidth (bytes read and written per second), and the rate of a bf16 matrix product;
- decodes: bytes of keys and values per second, as % of the copy bandwidth;
- prompts: floating-point operations of causal attention per second, as % of the matrix product's rate;
- decodes that share a prompt and have 64 more tokens each: its keys read for each sequence, or once for all.

Decodes and prompts are also measured with torch's `scaled_dot_product_attention` (SDPA) on dense keys and values, and
with FlashInfer if it is installed. Calls are captured in a CUDA graph, so that host time does not count, and use
several layers in turn, so that no keys come from the level 2 cache. Results are compared with torch's before the calls
are timed.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import ops_for
from kernels.inputs import PART_KEYS, AttentionMetadata, SharedParts

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
SHARED = [(batch, prompt) for prompt in (1024, 2048, 8192) for batch in (2, 8, 32, 128)]
OWN_TOKENS = 64
DECODES = [(batch, context) for context in (1024, 8192) for batch in (1, 32, 256)]
PROMPTS = [2048, 8192]
COLD_BYTES = 2**29
"""Minimum bytes of the keys and values of all layers, several times any GPU's level 2 cache."""
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
NUM_CALLS = 20
NUM_REPLAYS = 10


@dataclass(frozen=True)
class Result:
    """FlashInfer's time is None if it did not run."""

    what: str
    limit: str
    ours_us: float
    ours_percent: float
    sdpa_us: float
    flashinfer_us: float | None


class Setting:
    """Keys and values of `batch` sequences of `context` tokens, in shuffled blocks and dense."""

    def __init__(self, batch: int, context: int, query_len: int, device: torch.device) -> None:
        self.batch, self.context, self.query_len = batch, context, query_len
        num_blocks = batch * context // BLOCK_SIZE
        num_layers = max(1, COLD_BYTES // (batch * context * TOKEN_BYTES))
        pool = torch.randn((num_blocks, num_layers, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), dtype=DTYPE, device=device)
        tables = torch.randperm(num_blocks).view(batch, -1)
        self.layers = [pool[:, layer] for layer in range(num_layers)]
        self.tables = tables.to(device, torch.int32)
        self.metadata = AttentionMetadata.build([query_len] * batch, [context] * batch, tables, device)
        self.query = torch.randn((batch * query_len, HEADS, HEAD_DIM), dtype=DTYPE, device=device)

    def dense(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """SDPA's query, [batch, heads, query_len, head_dim], and each layer's keys and values, [batch, heads, tokens,
        head_dim].
        """
        query = self.query.view(self.batch, self.query_len, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        return query, [(self._dense(layer, 0), self._dense(layer, 1)) for layer in self.layers]

    def _dense(self, layer: Tensor, part: int) -> Tensor:
        blocks = layer[self.tables.long(), part]  # [batch, blocks, block_size, kv_heads, head_dim]
        return blocks.flatten(1, 2).transpose(1, 2).contiguous()


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench kernels_gpu measures kernels on an NVIDIA GPU, and torch finds none on this machine.")
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    bandwidth, rate = copy_bandwidth(device), matmul_rate(device)
    say(f"{name}, torch {torch.__version__}: copy {bandwidth / 1e9:.0f} GB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    flashinfer = import_flashinfer()
    say(f"{'':34}{'ours':>11}{'of limit':>10}{'SDPA, dense':>14}{'FlashInfer':>13}")
    results = []
    for result in measure(device, bandwidth, rate, flashinfer):
        results.append(result)
        say(
            f"{result.what:34}{result.ours_us:>8.1f} µs{result.ours_percent:>9.0f}%"
            f"{microseconds(result.sdpa_us):>14}{microseconds(result.flashinfer_us):>13}"
        )
    say(f"% of copy bandwidth for decodes, of the product's rate for prompts; {HEADS}/{KV_HEADS} heads of {HEAD_DIM}")
    say(f"{'decodes behind one prompt':34}{'for each':>14}{'together':>14}{'ratio':>7}")
    shared = []
    for batch, prompt in SHARED:
        apart_us, together_us = (1e6 * time for time in shared_seconds(batch, prompt, device))
        shared.append({"batch": batch, "prompt": prompt, "apart_us": apart_us, "together_us": together_us})
        what = f"{batch} behind {prompt} tokens"
        say(f"{what:34}{microseconds(apart_us):>14}{microseconds(together_us):>14}{apart_us / together_us:>7.2f}")
        torch.cuda.empty_cache()
    say(
        json.dumps(
            {
                "device": name,
                "torch": torch.__version__,
                "copy_bytes_per_second": bandwidth,
                "matmul_flop_per_second": rate,
                "results": [asdict(result) for result in results],
                "shared": shared,
            }
        )
    )


def measure(device: torch.device, bandwidth: float, rate: float, flashinfer: Any) -> Iterator[Result]:
    for batch, context in DECODES:
        # bytes of the paged, the dense and a temporary copy
        needed = 3 * max(batch * context * TOKEN_BYTES, COLD_BYTES)
        if torch.cuda.mem_get_info(device)[0] < needed:
            say(f"decode {batch} x {context}: left out, it takes {needed / 2**30:.0f} GiB")
            continue
        ours, sdpa, peer = times(Setting(batch, context, 1, device), flashinfer)
        percent = 100 * batch * context * TOKEN_BYTES / ours / bandwidth
        yield Result(f"decode, batch {batch}, context {context}", "copy", 1e6 * ours, percent, sdpa, peer)
        torch.cuda.empty_cache()
    for length in PROMPTS:
        ours, sdpa, peer = times(Setting(1, length, length, device), flashinfer)
        # causal attention computes half of both matrix products
        percent = 100 * 2 * HEADS * HEAD_DIM * length * (length + 1) / ours / rate
        yield Result(f"prompt of {length}", "product", 1e6 * ours, percent, sdpa, peer)
        torch.cuda.empty_cache()


def shared_seconds(batch: int, prompt: int, device: torch.device) -> tuple[float, float]:
    """Seconds of decodes that share a prompt, its keys read for each sequence, and once for all."""
    ops = ops_for(device)
    setting = Setting(batch, prompt + OWN_TOKENS, 1, device)
    tables = setting.tables.clone()
    tables[:, : prompt // BLOCK_SIZE] = tables[0, : prompt // BLOCK_SIZE]
    most, most_parts = ops.shared_tokens(HEADS // KV_HEADS, HEAD_DIM, DTYPE), prompt // PART_KEYS
    items = [(part, row, min(most, batch - row)) for part in range(most_parts) for row in range(0, batch, most)]
    of_items, rows, num_parts = (
        torch.tensor(column, dtype=torch.int32, device=device)
        for column in (items, list(range(batch)), [most_parts] * batch)
    )
    apart = replace(setting.metadata, block_tables=tables)
    together = replace(apart, shared=SharedParts(of_items, rows, num_parts, most_parts))
    calls = [
        [partial(ops.paged_attention, setting.query, layer, metadata, SCALE) for layer in setting.layers]
        for metadata in (apart, together)
    ]
    check_close(calls[1][0](), calls[0][0]())
    return seconds(calls[0]), seconds(calls[1])


def times(setting: Setting, flashinfer: Any) -> tuple[float, float, float | None]:
    """Time of a call: seconds with pagewire's kernel, microseconds with SDPA and with FlashInfer."""
    ops = ops_for(setting.query.device)
    calls = [partial(ops.paged_attention, setting.query, layer, setting.metadata, SCALE) for layer in setting.layers]
    expected, sdpa_us = sdpa_microseconds(setting)
    check_close(calls[0](), expected)
    return seconds(calls), sdpa_us, flashinfer_microseconds(setting, expected, flashinfer)


def sdpa_microseconds(setting: Setting) -> tuple[Tensor, float]:
    """SDPA's result for the first layer, [num_tokens, heads, head_dim], and microseconds of a call."""
    query, layers = setting.dense()
    attend = partial(
        functional.scaled_dot_product_attention, is_causal=setting.query_len > 1, scale=SCALE, enable_gqa=True
    )
    calls = [partial(attend, query, *layer) for layer in layers]
    return calls[0]().transpose(1, 2).reshape(setting.query.shape), 1e6 * seconds(calls)


def flashinfer_microseconds(setting: Setting, expected: Tensor, flashinfer: Any) -> float | None:
    """Microseconds of a FlashInfer call, or None, with the reason printed, if it is absent or fails."""
    if flashinfer is None:
        return None
    try:
        device = setting.query.device
        workspace = torch.empty(2**28, dtype=torch.uint8, device=device)
        blocks = setting.context // BLOCK_SIZE
        table_start = torch.arange(0, setting.batch * blocks + 1, blocks, dtype=torch.int32, device=device)
        last = torch.full((setting.batch,), BLOCK_SIZE, dtype=torch.int32, device=device)
        sizes = (HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        if setting.query_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(
                table_start, setting.tables.flatten(), last, *sizes, q_data_type=DTYPE, kv_data_type=DTYPE,
                sm_scale=SCALE,
            )  # fmt: skip
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(
                setting.metadata.query_start, table_start, setting.tables.flatten(), last, *sizes, causal=True,
                q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=SCALE,
            )  # fmt: skip
        layers = [layer.contiguous() for layer in setting.layers]
        check_close(wrapper.run(setting.query, layers[0]), expected)
        return 1e6 * seconds([partial(wrapper.run, setting.query, layer) for layer in layers])
    except Exception as error:
        say(f"FlashInfer did not run: {type(error).__name__}: {str(error)[:200]!r}")
        return None


def import_flashinfer() -> Any:
    return import_module("flashinfer") if find_spec("flashinfer") else None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copying kernel, read and written. In a CUDA graph, torch's `copy_` uses the slower copy
    engine.
    """
    source = torch.randint(2**30, (2**29,), dtype=torch.int32, device=device)
    destination = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: torch.bitwise_not(source, out=destination)])


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of square bf16 matrices."""
    size = 8192
    left, right = torch.randn(2, size, size, dtype=DTYPE, device=device)
    return 2 * size**3 / seconds([lambda: left @ right])


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Mean seconds of a call: the median over replays of a CUDA graph that contains each at least once."""
    for call in calls[:3]:
        call()  # these calls compile kernels and allocate memory before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = -(-NUM_CALLS // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    taken = []
    for replay in range(NUM_REPLAYS + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if replay > 1:  # the first replays are not measured, because the GPU's clocks rise during them
            taken.append(start.elapsed_time(stop) / 1e3)
    return float(statistics.median(taken)) / (rounds * len(calls))


def check_close(found: Tensor, expected: Tensor) -> None:
    """Compare every head of every token. bf16 has relative errors of up to 1/256, which average out within a head."""
    error = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert error.max() < 0.03, f"a result is off by {error.max():.1%} of its length"


def microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} µs"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
