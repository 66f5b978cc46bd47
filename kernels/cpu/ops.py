"""`kernels.ops.Ops` and `kernels.sampling.ops.SamplingOps` with compiled kernels. The import raises ImportError without
a library for this machine."""

import sys
from functools import partial
from typing import cast

import torch
from torch import Tensor

from kernels import composed, reference
from kernels.attention.options import check_attention_options
from kernels.cpu.library import library_path, load_library, supported, what_is_missing
from kernels.inputs import AttentionMetadata
from kernels.linear.mx_float4 import MAX_SCALE
from kernels.linear.quantization import W8A8_GROUP, WEIGHT_GROUP, quantize_int4, quantize_int8, quantize_w8a8
from kernels.ops import Activation, ClampedSwiglu, GroupedWeight, LoraWeights, MxFloat4Weight, Ops, Product, Table
from kernels.sampling.eager import Draws
from kernels.sampling.log_probabilities import log_probabilities as log_probabilities
from kernels.states import check_activation

_built = [name for name in supported() if library_path(name).exists()]
if not _built:
    raise ImportError(f"missing: {what_is_missing()}")
INSTRUCTION_SET = _built[0]
"""Key of `library.INSTRUCTION_SETS`."""

_library = load_library(INSTRUCTION_SET)

rotary_embedding = _library.rotary_embedding
store_kv = _library.store_kv
copy_blocks = reference.copy_blocks
grouped_float8 = reference.grouped_float8
grouped_linear = reference.grouped_linear
choose_experts = reference.choose_experts
group_rows = reference.group_rows
combine_rows = reference.combine_rows
shared_tokens = reference.shared_tokens

WIDE_PRODUCTS = True
GROUPED_PRODUCTS = False


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    normed: Tensor = _library.rms_norm(x, weight, eps, offset, dtype)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    normed: Tensor = _library.add_rms_norm(x, residual, weight, eps, offset)
    return normed


def paged_attention(
    query: Tensor,
    layer_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    check_attention_options(query, window, soft_cap, bias, causal, sinks, chunked, metadata.visible_ends)
    output: Tensor = _library.paged_attention(
        query,
        layer_cache,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables,
        scale,
        window or 0,
        soft_cap or 0.0,
        bias,
        causal,
        sinks,
        chunked,
        metadata.visible_ends,
    )
    return output


def qkv_attention(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: float,
    rotation: tuple[Tensor, Tensor] | None,
    layer_cache: Tensor,
    slots: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    check_attention_options(qkv, window, soft_cap, None, True, None, chunked, metadata.visible_ends)
    output: Tensor = _library.qkv_attention(
        qkv,
        norms,
        eps,
        offset,
        rotation,
        layer_cache,
        slots,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables,
        scale,
        window or 0,
        soft_cap or 0.0,
        sinks,
        chunked,
        metadata.visible_ends,
    )
    return output


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    if isinstance(activation, ClampedSwiglu):
        activated: Tensor = _library.clamped_swiglu(x, *activation)
    else:
        activated = _library.gated_activation(x, activation)
    return activated


def add_lora(y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> None:
    _library.add_lora(y, x, slots, weights.a, weights.b, weights.ranks, weights.starts)


def pack(weight: Tensor, wide: bool = False) -> Product:
    # All products by packed weights are batch-invariant.
    outputs, inputs = weight.shape
    if not _library.can_pack(inputs):
        return reference.pack_batch_invariant(weight, wide)
    return _Packed(_library.pack(weight), outputs, inputs, wide)


pack_batch_invariant = pack


def wide_itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize


def pack_int8(weight: Tensor, wide: bool = False) -> Product | None:
    if weight.dtype is not torch.bfloat16 or not _library.can_pack_int8(weight.shape[1]):
        return None
    outputs, packed = len(weight), _library.pack_int8(*quantize_int8(weight))
    return lambda x, bias: _library.linear(x, packed, bias, outputs, wide)


def pack_int4(weight: Tensor, wide: bool = False) -> Product | None:
    if weight.dtype is not torch.bfloat16 or not _library.can_pack(weight.shape[1]):
        return None
    return pack_grouped(quantize_int4(weight), wide)


def pack_w8a8(weight: Tensor, wide: bool = False) -> Table | None:
    outputs, inputs = weight.shape
    if weight.dtype is not torch.bfloat16 or not _library.can_pack(inputs):
        return None
    return _Packed(_library.pack_w8a8(*quantize_w8a8(weight)), outputs, inputs, wide)


def pack_grouped(weight: GroupedWeight, wide: bool = False) -> Table | None:
    outputs, inputs = weight.numbers.shape
    if not _library.can_pack(inputs):
        return None
    numbers, scales, minimums, bits, units, _ = weight
    first, second = scales[:, ::2], scales[:, 1::2]
    # w8a8 needs one scale for each group of 64 inputs, which compressed-tensors' W8A8 and larger groups have, too.
    is_w8a8 = bits == 8 and minimums is None and scales.shape[1] * WEIGHT_GROUP == inputs
    if is_w8a8 and inputs % W8A8_GROUP == 0 and first.equal(second):
        packed = _library.pack_w8a8((numbers ^ 128).view(torch.int8), first.float().contiguous())
    else:
        packed = _library.pack_grouped(numbers, scales, minimums, bits, units)
    return _Packed(packed, outputs, inputs, wide)


def pack_mx_float4(weight: MxFloat4Weight, wide: bool = False) -> Product | None:
    if weight.scales.numel() and int(weight.scales.max()) > MAX_SCALE:
        raise ValueError(f"a scale is above 2 to the power of {MAX_SCALE - 127}, with which weights are not finite")
    outputs, packed = len(weight.numbers), _library.pack_mx_float4(*weight)
    return lambda x, bias: _library.linear(x, packed, bias, outputs, wide)


pack_float8 = partial(composed.pack_float8, cast(Ops, sys.modules[__name__]))


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
    activation: str | None,
) -> Tensor:
    check_activation(activation)
    output: Tensor = _library.short_convolution(x, weight, bias, states, *_sequences(metadata), activation == "silu")
    return output


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
    normalize: bool,
) -> Tensor:
    decay, beta = _floats(decay), None if beta is None else _floats(beta)
    output: Tensor = _library.gated_delta_rule(query, key, value, decay, beta, states, *_sequences(metadata), normalize)
    return output


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    d = None if d is None else _floats(d)
    output: Tensor = _library.selective_scan(x, _floats(dt), _floats(a), b, c, d, states, *_sequences(metadata))
    return output


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    token_ids, largest = _library.greedy(logits.contiguous())
    return token_ids, largest


def keep(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    _library.keep(logits, rows, bits)


def draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    token_ids: Tensor = _library.draw(
        logits.contiguous(),
        largest.float(),
        draws.rows,
        draws.keys,
        draws.temperature,
        draws.min_p.log(),
        draws.top_k,
        draws.top_p,
    )
    return token_ids


def _sequences(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    return metadata.query_start, metadata.context_lens, metadata.block_tables


def _floats(numbers: Tensor) -> Tensor:
    return numbers.float().contiguous()


class _Packed:
    def __init__(self, packed: Tensor, outputs: int, inputs: int, wide: bool) -> None:
        self._packed, self._outputs, self._inputs, self._wide = packed, outputs, inputs, wide

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = _library.linear(x, self._packed, bias, self._outputs, self._wide)
        return product

    def rows(self, numbers: Tensor) -> Tensor:
        found: Tensor = _library.packed_rows(self._packed, numbers, self._outputs, self._inputs)
        return found
