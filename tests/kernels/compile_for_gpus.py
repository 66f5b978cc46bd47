"""Compiles every Triton kernel for absent GPUs, as its launcher would, because the interpreter runs code that no
compiler accepts. Arguments: compute capabilities, such as 90.

Tensors are on the meta device, and compiled kernels are not launched. Shared memory is compared with the smallest GPU
of each generation. For batch-invariant kernels, one attention kernel must serve all batches, and products of any number
of rows must use one kind of instruction with the same steps over the inputs.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import triton as ops
from kernels.attention.narrow_cache import stored_size
from kernels.float8 import FLOAT8, Float8Weight
from kernels.inputs import AttentionMetadata, SharedParts
from kernels.ops import ClampedSwiglu, LoraWeights
from kernels.sampling.eager import Draws
from kernels.triton import invariant, sampling
from kernels.triton.linear.round_rows import round_rows

SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes for a program, by compute capability. In the generation of 8.0, 8.6 and 8.9 have the least."""


class AbsentDevice:
    """The part of a driver that Triton uses before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are cached for each device

    def get_current_stream(self, device: int) -> int:
        return 0


INSTRUCTION = re.compile(r"\b(wgmma|mma)\.[\w.]*?m\d+n\d+(k\d+)")
"""A tensor core's instruction: its kind, and its part of a sum."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    query_len: int,
    context_len: int,
    groups: int = 4,
    kv_heads: int = 8,
    head_dim: int = 128,
    attend: Callable[..., Tensor] = ops.paged_attention,
    shares: bool = False,
    has_images: bool = False,
    cache_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    metadata = AttentionMetadata(
        query_start=empty(3, dtype=torch.int32),
        context_lens=empty(2, dtype=torch.int32),
        block_tables=empty(2, 512, dtype=torch.int32),
        max_query_len=query_len,
        max_context_len=context_len,
        shared=SharedParts(*(empty(3, 3, dtype=torch.int32),) * 3, 2) if shares else None,
        visible_ends=empty(query_len + 1, dtype=torch.int32) if has_images else None,
    )
    query = empty(query_len + 1, groups * kv_heads, head_dim)
    attend(query, layer_cache(kv_heads, head_dim, cache_dtype), metadata, 0.1, **options)


def layer_cache(kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return empty(9, 4, 2, 16, kv_heads, stored_size(head_dim, dtype), dtype=dtype)[:, 1]


def latents(query_len: int, num_heads: int, attend: Callable[..., Tensor] = ops.paged_attention) -> None:
    ids = empty(3, dtype=torch.int32)
    metadata = AttentionMetadata(ids, ids[:2], empty(2, 512, dtype=torch.int32), query_len, 8000)
    attend(empty(query_len + 1, num_heads, 576), empty(9, 4, 1, 16, 1, 576)[:, 1], metadata, 0.1)


def qkv_attention(norms: tuple[Tensor, Tensor] | None, cache_dtype: torch.dtype = torch.bfloat16) -> None:
    ids, floats = empty(5, dtype=torch.int32), empty(5, 60, dtype=torch.float32)
    metadata = AttentionMetadata(ids, ids, empty(5, 512, dtype=torch.int32), 1, 100)
    cache = layer_cache(8, 128, cache_dtype)
    slots = empty(5, dtype=torch.int64)
    ops.qkv_attention(empty(5, 48 * 128), norms, 1e-5, 0.0, (floats, floats), cache, slots, metadata, 0.1)


def launches(capability: int, *, is_thorough: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """All kernels for one GPU; for others only products and shared memory, which differ most."""
    yield "decode", lambda: attention(1, 100)
    yield "chunk and decode", lambda: attention(2000, 2000)
    yield "decode of latents", lambda: latents(1, 16)
    bias = empty(32, 129, dtype=torch.float32)  # which takes shared memory too
    if capability != 90:
        yield "chunk and decode of int8", lambda: attention(2000, 2000, cache_dtype=torch.int8)
        yield "experts", lambda: ops.grouped_linear(empty(9, 64), empty(8, 70, 64), empty(8, dtype=torch.int64))
        yield "chunk and decode with a bias", lambda: attention(2000, 2000, bias=bias)
        return
    yield "split decode over a whole context", lambda: attention(1, 8000, kv_heads=1, causal=False)
    yield "heads of 256 with a bias", lambda: attention(500, 2000, head_dim=256, bias=bias)
    sinks = empty(56, dtype=torch.float32)
    yield (
        "heads of 80, a window, a soft cap, sinks",
        lambda: attention(9, 8000, groups=7, head_dim=80, window=9, soft_cap=5.0, sinks=sinks),
    )
    yield "chunks with images and a window", lambda: attention(2000, 2000, window=512, has_images=True)
    yield "chunks of latents", lambda: latents(2000, 128)
    yield "chunks of 9 tokens", lambda: attention(9, 8000, window=9, chunked=True)
    floats = empty(5, 32, dtype=torch.float32)
    ids = empty(5, dtype=torch.int64)
    yield "rms_norm", lambda: ops.rms_norm(empty(5, 4096), empty(4096), 1e-5)
    residual = empty(5, 4096, dtype=torch.float32)
    yield "rms_norm, wide", lambda: ops.rms_norm(empty(5, 4096), empty(4096), 1e-5, dtype=torch.float32)
    yield "add_rms_norm", lambda: ops.add_rms_norm(empty(5, 4096), residual, empty(4096), 1e-5)
    yield "add_rms_norm, wide", lambda: ops.add_rms_norm(residual, residual, empty(4096), 1e-5)
    yield "rotary_embedding", lambda: ops.rotary_embedding(empty(5, 32, 128), floats, floats)
    yield "store_kv", lambda: ops.store_kv(empty(5, 8, 128), empty(5, 8, 128), empty(9, 4, 2, 16, 8, 128)[:, 1], ids)
    latent = empty(5, 1, 576)
    yield "store_kv of latents", lambda: ops.store_kv(latent, latent, empty(9, 4, 1, 16, 1, 576)[:, 1], ids)
    heads = empty(5, 8, 128)
    for dtype in (torch.int8, FLOAT8):
        kept = layer_cache(8, 128, dtype)
        yield f"store_kv in {dtype}", lambda kept=kept: ops.store_kv(heads, heads, kept, ids)
    # Heads of 256 take 16 s of 129, more than any other kernel.
    size = 256 if is_thorough else 64
    yield f"heads of {size} in e4m3", lambda: attention(500, 2000, head_dim=size, cache_dtype=FLOAT8)
    yield "qkv_attention in e4m3", lambda: qkv_attention((empty(128), empty(128)), FLOAT8)
    yield "round_rows", lambda: round_rows(empty(5, 4096))
    for activation in ("silu", "gelu", "gelu_tanh", "sigmoid", "softplus", ClampedSwiglu(1.7, 7.0)):
        yield str(activation), lambda activation=activation: ops.gated_activation(empty(5, 2048), activation)
    rows = empty(5, dtype=torch.int32)
    for starts in ((0, 6144), (0, 3072, 6144), (0, 4096, 5120, 6144)):
        lora = LoraWeights(empty(4, len(starts) - 1, 64, 4096), empty(4, 64, 6144), rows[:4], starts)
        yield "add_lora", lambda lora=lora: ops.add_lora(empty(5, 6144), empty(5, 4096), rows, lora)
    yield "copy_blocks", lambda: ops.copy_blocks(empty(9, 4096), ids, ids)
    for norms in (None, (empty(128), empty(128))):
        yield "qkv_attention", lambda norms=norms: qkv_attention(norms)
    for added in (None, empty(512)):
        for wide in (False, True):
            product = ops.pack(empty(512, 14_336), wide)
            yield "linear", lambda product=product, added=added: product(empty(1, 14_336), added)
    ends = empty(128, dtype=torch.int64)
    half = torch.bfloat16
    for count, width, dtype, wide in (
        (40, 2048, half, False), (9000, 2048, half, True), (65_536, 2048, half, False), (40, 64, torch.float32, False)
    ):  # fmt: skip
        x, experts = empty(count, width, dtype=dtype), empty(128, 1536, width, dtype=dtype)
        yield "grouped_linear", lambda x=x, experts=experts, wide=wide: ops.grouped_linear(x, experts, ends, wide)
    for count, experts, groups in ((40, 128, 1), (9000, 128, 16), (1, 1, 16), (40, 1, 16), (2000, 1, 16)):
        scales = empty(experts, 1536, groups, dtype=torch.float32)
        weight = Float8Weight(empty(experts, 1536, 2048, dtype=FLOAT8), scales)
        yield (
            f"grouped_float8 of {count} rows, {experts} experts and {groups} groups",
            lambda count=count, weight=weight: ops.grouped_float8(
                empty(count, 2048), weight, ends[: len(weight.scales)]
            ),
        )
    places, shares = empty(5, 8, dtype=torch.int64), empty(5, 8, dtype=torch.float32)
    for renormalise in (False, True):
        scores = empty(5, 128, dtype=torch.float32)
        yield "choose_experts", lambda scores=scores, kept=renormalise: ops.choose_experts(scores, 8, kept)
    for chosen in (empty(1, 8, dtype=torch.int64), empty(900, 8, dtype=torch.int64)):
        yield "group_rows", lambda chosen=chosen: ops.group_rows(chosen, 128)
    yield "combine_rows", lambda: ops.combine_rows(empty(40, 2048), places, shares)
    yield from state_launches()
    logits, numbers = empty(5, 128_256, dtype=torch.float32), empty(5, dtype=torch.float32)
    draws = Draws(rows=ids, keys=ids, temperature=numbers, min_p=numbers, top_k=ids, top_p=numbers)
    yield "greedy", lambda: sampling.greedy(logits)
    yield "draw", lambda: sampling.draw(logits, numbers, draws)
    yield "log_probabilities", lambda: sampling.log_probabilities(logits, ids, 5)


def state_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operation on states is launched for decodes and for chunks."""
    ids, wide = empty(5, dtype=torch.int32), partial(empty, dtype=torch.float32)
    for query_len in (1, 2000):
        metadata = AttentionMetadata(ids, ids[:4], empty(4, 1, dtype=torch.int32), query_len, 2000)
        count = query_len + 3
        for bias, activation in ((None, "silu"), (empty(8192), None)):
            inputs = empty(count, 8192), empty(8192, 4), bias, empty(9, 8192, 3)
            yield "short_convolution", partial(ops.short_convolution, *inputs, metadata, activation)
        for size, decays, has_beta in ((128, (), True), (256, (256,), True), (96, (), False)):
            keys, beta = empty(count, 16, size), wide(count, 32) if has_beta else None
            inputs = keys, keys, empty(count, 32, size), wide(count, 32, *decays), beta, wide(9, 32, size, size)
            yield "gated_delta_rule", partial(ops.gated_delta_rule, *inputs, metadata, has_beta)
        x, columns, states = empty(count, 128, 64), empty(count, 8, 128), wide(9, 128, 64, 128)
        rates = wide(count, 128), wide(128)
        yield "selective_scan", partial(ops.selective_scan, x, *rates, columns, columns, None, states, metadata)
        x, columns, states = empty(count, 1, 5120), empty(count, 1, 16), wide(9, 1, 5120, 16)
        rates = wide(count, 1, 5120), wide(1, 5120, 16)
        yield (
            "selective_scan of Mamba",
            partial(ops.selective_scan, x, *rates, columns, columns, wide(1, 5120), states, metadata),
        )


INVARIANT_BATCHES = ((1, 100), (1, 8000), (3, 8000), (2000, 2000))
"""Query tokens and contexts: decodes over one and several parts of the keys, and chunks; also shared decodes."""
ROWS = (1, 64, 65, 600)
"""Numbers of rows with which a product has all its tiles."""


def invariant_launches(capability: int) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """Launches that must use the same kernel, or products with the same order of sums."""
    by_position = partial(attention, attend=invariant.paged_attention)
    shapes: list[dict[str, Any]] = [{}, {"head_dim": 256}, {"groups": 7, "head_dim": 64, "window": 9}]
    shapes[2]["sinks"] = empty(56, dtype=torch.float32)
    for shape in shapes if capability == 90 else shapes[:1]:
        yield (
            f"attention by position { {name: size for name, size in shape.items() if name != 'sinks'} }",
            [
                *(partial(by_position, *batch, **shape) for batch in INVARIANT_BATCHES),
                partial(by_position, 1, 8000, shares=True, **shape),
                partial(by_position, 2000, 2000, has_images=True, **shape),
            ],
        )
    latents_by_position = partial(latents, num_heads=16, attend=invariant.paged_attention)
    yield "latents by position", [partial(latents_by_position, query_len) for query_len in (1, 3, 2000)]
    product = invariant.pack(empty(4096, 4096), True)
    yield "products", [partial(product, empty(rows, 4096), None) for rows in ROWS]


def main() -> None:
    compiled: list[Any] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert not warmup
        binary = run(kernel, *args, grid=grid, warmup=True, **options)
        compiled.append(binary)

    run, JITFunction.run = JITFunction.run, compile_only
    for capability, most in ((capability, SHARED_MEMORY[capability]) for capability in map(int, sys.argv[1:])):
        triton.runtime.driver.set_active(AbsentDevice(capability))
        for module in (
            "attention.latent_attention",
            "attention.paged_attention",
            "linear.grouped_linear",
            "linear.invariant_linear",
        ):
            import_module(f"kernels.triton.{module}").shared_memory = lambda _, most=most: most
        for name, launch in launches(capability, is_thorough=len(sys.argv) > 2):
            compiled.clear()
            launch()
            assert compiled, f"{name} launched nothing"
            for binary in compiled:
                kernel, shared = binary.metadata.name, binary.metadata.shared
                print(f"sm_{capability} {name}: {kernel} takes {shared} bytes of shared memory")  # noqa: T201
                assert shared <= most, f"more than {most}"
        for name, alike in invariant_launches(capability):
            compiled.clear()
            for launch in alike:
                launch()
            kernels = [binary for binary in compiled if "merge" not in binary.metadata.name]
            assert len(kernels) >= len(alike)
            assert max(binary.metadata.shared for binary in compiled) <= most
            steps = {step for binary in kernels for step in INSTRUCTION.findall(binary.asm["ptx"])}
            print(f"sm_{capability} {name}: {len({binary.hash for binary in kernels})} kernels, {steps}")  # noqa: T201
            assert len(steps) == 1
            assert name == "products" or len({binary.hash for binary in kernels}) == 1


if __name__ == "__main__":
    main()
