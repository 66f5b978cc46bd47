"""Compares the compiled operations on states with transformers' functions in torch, in turn on one machine.

python -m bench states [--rounds 7]

For the sizes of one layer of Qwen3-Next 80B-A3B, Granite 4.0 H Tiny and LFM2 350M, in bfloat16: a step of 1, 8 and 32
decodes, and prompts of 512 and 2,048 tokens. Prints the median microseconds of both, and their ratio. transformers'
functions are the single-token forms for decodes and the chunked forms for prompts, as in its models.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from kernels.backends import backend_name, ops_for
from kernels.inputs import AttentionMetadata

CPU = torch.device("cpu")
STEPS = [(1, 1), (8, 1), (32, 1), (1, 512), (1, 2048)]
"""Sequences, and query tokens of each. Decodes continue a sequence; prompts begin one."""

_random = partial(torch.randn, dtype=torch.bfloat16)


def metadata_of(sequences: int, tokens: int) -> AttentionMetadata:
    context = tokens if tokens > 1 else 100
    blocks = torch.arange(sequences).view(-1, 1)
    return AttentionMetadata.build([tokens] * sequences, [context] * sequences, blocks, CPU)


Pair = tuple[Callable[[], object], Callable[[], object]]
"""Our operation and transformers' function, with their arguments."""


def convolution(channels: int, taps: int, activation: str | None, sequences: int, tokens: int) -> Pair:
    x, weight = _random(sequences * tokens, channels), _random(channels, taps)
    states, metadata = _random(sequences, channels, taps - 1), metadata_of(sequences, tokens)
    ours = partial(ops_for(CPU).short_convolution, x, weight, None, states, metadata, activation)
    turned = x.view(sequences, tokens, channels).transpose(1, 2)
    if tokens == 1:
        return ours, partial(qwen3_next.causal_conv1d_update, turned, states.clone(), weight, None, activation)
    return ours, partial(qwen3_next.causal_conv1d_fn, turned, weight, None, activation)


def delta_rule(key_heads: int, value_heads: int, size: int, sequences: int, tokens: int) -> Pair:
    rows = sequences * tokens
    query, key, value = (_random(rows, heads, size) for heads in (key_heads, key_heads, value_heads))
    decay, beta = -torch.rand(rows, value_heads), _random(rows, value_heads).sigmoid()
    states, metadata = torch.randn(sequences, value_heads, size, size), metadata_of(sequences, tokens)
    ours = partial(ops_for(CPU).gated_delta_rule, query, key, value, decay, beta, states, metadata, True)
    inputs = [part.view(sequences, tokens, *part.shape[1:]) for part in (query, key, value, decay, beta)]
    theirs = qwen3_next.torch_recurrent_gated_delta_rule if tokens == 1 else qwen3_next.torch_chunk_gated_delta_rule
    state = states.clone() if tokens == 1 else None
    return ours, partial(theirs, *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)


def scan(heads: int, size: int, columns: int, sequences: int, tokens: int) -> Pair:
    rows = sequences * tokens
    x, b, c = _random(rows, heads, size), _random(rows, 1, columns), _random(rows, 1, columns)
    dt, a, d = torch.rand(rows, heads), -torch.rand(heads), torch.randn(heads)
    states, metadata = torch.randn(sequences, heads, size, columns), metadata_of(sequences, tokens)
    ours = partial(ops_for(CPU).selective_scan, x, dt, a, b, c, d, states, metadata)
    if tokens == 1:
        each_dt, each_d = dt[..., None].expand(-1, -1, size), d[:, None].expand(-1, size)
        each_a = a[:, None, None].expand(-1, size, columns)
        return ours, partial(mamba2.mamba2_selective_state_update, states.clone(), x, each_dt, each_a, b, c, each_d)
    inputs: list[Tensor] = [part.view(sequences, tokens, *part.shape[1:]) for part in (x, dt, b, c)]
    x, dt, b, c = inputs
    return ours, partial(mamba2.mamba2_chunk_scan, x, dt, a, b, c, 256, d, return_final_states=True)


LAYERS: dict[str, Callable[[int, int], Pair]] = {
    "Qwen3-Next, convolution": partial(convolution, 8192, 4, "silu"),
    "Qwen3-Next, delta rule": partial(delta_rule, 16, 32, 128),
    "Granite 4, convolution": partial(convolution, 3328, 4, "silu"),
    "Granite 4, scan": partial(scan, 48, 64, 128),
    "LFM2, convolution": partial(convolution, 1024, 3, None),
}


def microseconds(call: Callable[[], object]) -> float:
    """The time of a call, repeated for at least 20 ms."""
    begun, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begun < 0.02:
        call()
        count += 1
    return (time.perf_counter() - begun) / count * 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    sys.stdout.write(f"{backend_name(CPU)}, {torch.get_num_threads()} threads\n")
    for name, layer in LAYERS.items():
        for sequences, tokens in STEPS:
            ours, theirs = layer(sequences, tokens)
            figures = [(microseconds(ours), microseconds(theirs)) for _ in range(rounds + 1)][1:]  # warmed up
            mine, peer = (statistics.median(column) for column in zip(*figures, strict=True))
            step = f"{sequences} decodes" if tokens == 1 else f"prompt of {tokens}"
            sys.stdout.write(f"{name:26}{step:16}{mine:10.0f} µs{peer:12.0f} µs in torch{peer / mine:8.1f} x\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
