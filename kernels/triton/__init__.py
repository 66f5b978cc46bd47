"""The GPU's backend: `kernels.ops.Ops` in Triton kernels, tested against `kernels.reference`. With TRITON_INTERPRET=1
set before triton's import, the kernels run slowly on a CPU, as in tests without a GPU. No kernel moves blocks to host
memory: blocks are contiguous, so torch's `copy_` uses the copy engine while kernels run."""

from kernels.reference import pack_grouped, pack_int4, pack_int8, pack_mx_float4, pack_w8a8, wide_itemsize
from kernels.triton.attention.attention_by_position import shared_tokens
from kernels.triton.attention.copy_blocks import copy_blocks
from kernels.triton.attention.paged_attention import paged_attention
from kernels.triton.attention.qkv_attention import qkv_attention
from kernels.triton.attention.store_kv import store_kv
from kernels.triton.layers.gated_activation import gated_activation
from kernels.triton.layers.rms_norm import add_rms_norm, rms_norm
from kernels.triton.layers.rotary_embedding import rotary_embedding
from kernels.triton.linear.add_lora import add_lora
from kernels.triton.linear.choose_experts import choose_experts
from kernels.triton.linear.combine_rows import combine_rows
from kernels.triton.linear.float8_linear import pack_float8
from kernels.triton.linear.group_rows import group_rows
from kernels.triton.linear.grouped_float8 import grouped_float8
from kernels.triton.linear.grouped_linear import grouped_linear
from kernels.triton.linear.invariant_linear import pack as pack_batch_invariant
from kernels.triton.linear.linear import pack
from kernels.triton.states.gated_delta_rule import gated_delta_rule
from kernels.triton.states.selective_scan import selective_scan
from kernels.triton.states.short_convolution import short_convolution

WIDE_PRODUCTS = False
"""Assumed, not measured: float32 results are slower than bf16."""

GROUPED_PRODUCTS = True

__all__ = [
    "add_lora",
    "add_rms_norm",
    "choose_experts",
    "combine_rows",
    "copy_blocks",
    "gated_activation",
    "gated_delta_rule",
    "group_rows",
    "grouped_float8",
    "grouped_linear",
    "pack",
    "pack_batch_invariant",
    "pack_float8",
    "pack_grouped",
    "pack_int4",
    "pack_int8",
    "pack_mx_float4",
    "pack_w8a8",
    "paged_attention",
    "qkv_attention",
    "rms_norm",
    "rotary_embedding",
    "selective_scan",
    "shared_tokens",
    "short_convolution",
    "store_kv",
    "wide_itemsize",
]
