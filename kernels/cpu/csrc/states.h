// Operations on states of sequences, defined in kernels/states.py. query_start, context_lens and block_tables: metadata,
// int32; the first column of block_tables has each sequence's block. States are strided in dimension 0 alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace pagewire {

// x: [tokens, channels]. weight: [channels, taps], in x's type or float32, and so is bias: [channels]. states: [blocks,
// channels, taps - 1] in x's type.
at::Tensor short_convolution(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::Tensor states,
    const at::Tensor& query_start, const at::Tensor& context_lens, const at::Tensor& block_tables, bool silu);

// query, key: [tokens, key_heads, key_dim]; value: [tokens, value_heads, value_dim]; of one type. decay: [tokens,
// value_heads] or [tokens, value_heads, key_dim] float32; beta: [tokens, value_heads] float32. states: [blocks,
// value_heads, key_dim, value_dim] float32.
at::Tensor gated_delta_rule(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& decay,
    const std::optional<at::Tensor>& beta, at::Tensor states, const at::Tensor& query_start,
    const at::Tensor& context_lens, const at::Tensor& block_tables, bool normalize);

// x: [tokens, heads, size]; b, c: [tokens, groups, columns]; of one type. dt: [tokens, heads] or [tokens, heads, size]
// float32; a: [heads] or [heads, size, columns] float32; d: [heads] or [heads, size] float32. states: [blocks, heads,
// size, columns] float32.
at::Tensor selective_scan(
    const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
    const std::optional<at::Tensor>& d, at::Tensor states, const at::Tensor& query_start,
    const at::Tensor& context_lens, const at::Tensor& block_tables);

}  // namespace pagewire
