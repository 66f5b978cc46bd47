// Checks the arguments of the operations on states, and calls them by element type.
#include "states.h"

#include <ATen/ops/empty.h>

#include "checks.h"
#include "delta_rule.h"
#include "selective_scan.h"
#include "short_convolution.h"

namespace pagewire {
namespace {

using at::Tensor;

// Contiguous but for the stride of dimension 0.
void check_rows_of(const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.sizes() == sizes, name, " is ",
              tensor.sizes(), " of ", tensor.scalar_type(), ", and must be ", sizes, " of ", type, " on the CPU");
  TORCH_CHECK(tensor.size(0) == 0 || tensor.select(0, 0).is_contiguous(), name, " must be contiguous but for dimension 0");
}

Sequences check_sequences(
    const Tensor& query_start, const Tensor& context_lens, const Tensor& block_tables, int64_t rows, int64_t blocks) {
  const int64_t count = context_lens.numel();
  check_numbers(query_start, at::kInt, count + 1, "query_start");
  check_numbers(context_lens, at::kInt, count, "context_lens");
  TORCH_CHECK(block_tables.device().is_cpu() && block_tables.scalar_type() == at::kInt && block_tables.dim() == 2 &&
                  block_tables.size(0) == count && (count == 0 || block_tables.size(1) > 0),
              "block_tables must be int32 with a block for each sequence");
  const Sequences sequences{
      query_start.const_data_ptr<int32_t>(), context_lens.const_data_ptr<int32_t>(),
      block_tables.const_data_ptr<int32_t>(), block_tables.stride(0), count};
  TORCH_CHECK(sequences.starts[0] == 0 && sequences.starts[count] == rows, "query_start does not fit the rows");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t tokens = sequences.tokens(i);
    TORCH_CHECK(0 <= tokens && tokens <= sequences.contexts[i], "sequence ", i, " has ", tokens, " query tokens of ",
                sequences.contexts[i]);
    TORCH_CHECK(tokens == 0 || (0 <= sequences.block(i) && sequences.block(i) < blocks), "sequence ", i,
                " has its state in block ", sequences.block(i), " of ", blocks);
  }
  return sequences;
}

}  // namespace

Tensor short_convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor states, const Tensor& query_start,
    const Tensor& context_lens, const Tensor& block_tables, bool silu) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && states.dim() == 3 && weight.size(1) > 0,
              "x must be [tokens, channels], weight [channels, taps], and states [blocks, channels, taps - 1]");
  const int64_t channels = x.size(1), taps = weight.size(1);
  check_rows_of(x, x.scalar_type(), {x.size(0), channels}, "x");
  check_numbers(weight, weight.scalar_type(), channels * taps, "weight");
  if (bias.has_value()) check_numbers(*bias, weight.scalar_type(), channels, "bias");
  check_rows_of(states, x.scalar_type(), {states.size(0), channels, taps - 1}, "states");
  const Sequences sequences = check_sequences(query_start, context_lens, block_tables, x.size(0), states.size(0));
  auto out = at::empty(x.sizes(), x.options());
  for_types(weight, x, [&](auto weight_type, auto type) {
    using W = decltype(weight_type);
    using T = decltype(type);
    short_convolution<T, W>(
        {out.template data_ptr<T>(), x.const_data_ptr<T>(), weight.const_data_ptr<W>(),
         bias.has_value() ? bias->template const_data_ptr<W>() : nullptr, states.template data_ptr<T>(), x.stride(0),
         states.stride(0), channels, taps, silu, sequences});
  });
  return out;
}

Tensor gated_delta_rule(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay, const std::optional<Tensor>& beta,
    Tensor states, const Tensor& query_start, const Tensor& context_lens, const Tensor& block_tables, bool normalize) {
  TORCH_CHECK(key.dim() == 3 && value.dim() == 3 && states.dim() == 4 && key.size(1) > 0 && key.size(2) > 0 &&
                  value.size(1) % key.size(1) == 0 && (decay.dim() == 2 || decay.dim() == 3),
              "key, value, decay and states must be [tokens, heads, ...], with a multiple of key heads as value heads");
  const int64_t tokens = key.size(0), key_heads = key.size(1), key_dim = key.size(2), heads = value.size(1),
                size = value.size(2);
  const auto type = value.scalar_type();
  check_rows_of(query, type, {tokens, key_heads, key_dim}, "query");
  check_rows_of(key, type, {tokens, key_heads, key_dim}, "key");
  check_rows_of(value, type, {tokens, heads, size}, "value");
  check_rows_of(states, at::kFloat, {states.size(0), heads, key_dim, size}, "states");
  check_numbers(decay, at::kFloat, tokens * heads * (decay.dim() == 3 ? key_dim : 1), "decay");
  if (beta.has_value()) check_numbers(*beta, at::kFloat, tokens * heads, "beta");
  const Sequences sequences = check_sequences(query_start, context_lens, block_tables, tokens, states.size(0));
  auto out = at::empty(value.sizes(), value.options());
  for_type(value, [&](auto number) {
    using T = decltype(number);
    gated_delta_rule<T>(
        {out.template data_ptr<T>(), query.const_data_ptr<T>(), key.const_data_ptr<T>(), value.const_data_ptr<T>(),
         decay.const_data_ptr<float>(), beta.has_value() ? beta->const_data_ptr<float>() : nullptr,
         states.data_ptr<float>(), query.stride(0), key.stride(0), value.stride(0), states.stride(0), key_heads, heads,
         key_dim, size, decay.dim() == 3 ? key_dim : 1, normalize, sequences});
  });
  return out;
}

Tensor selective_scan(
    const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const std::optional<Tensor>& d,
    Tensor states, const Tensor& query_start, const Tensor& context_lens, const Tensor& block_tables) {
  TORCH_CHECK(x.dim() == 3 && b.dim() == 3 && states.dim() == 4 && x.size(1) > 0 && b.size(1) > 0 &&
                  x.size(1) % b.size(1) == 0 && (a.dim() == 1 || a.dim() == 3),
              "x, B, C and states must be [tokens, heads, ...], with a multiple of groups as heads");
  const int64_t tokens = x.size(0), heads = x.size(1), size = x.size(2), groups = b.size(1), columns = b.size(2),
                rows = heads * size;
  check_rows_of(x, x.scalar_type(), {tokens, heads, size}, "x");
  check_rows_of(b, x.scalar_type(), {tokens, groups, columns}, "B");
  check_rows_of(c, x.scalar_type(), {tokens, groups, columns}, "C");
  check_rows_of(states, at::kFloat, {states.size(0), heads, size, columns}, "states");
  const bool each_dt = dt.dim() == 3, each_d = d.has_value() && d->dim() == 2, each_a = a.dim() == 3;
  check_rows_of(dt, at::kFloat, each_dt ? x.sizes() : x.sizes().slice(0, 2), "dt");
  check_numbers(a, at::kFloat, each_a ? rows * columns : heads, "A");
  if (d.has_value()) check_numbers(*d, at::kFloat, each_d ? rows : heads, "D");
  const Sequences sequences = check_sequences(query_start, context_lens, block_tables, tokens, states.size(0));
  auto out = at::empty(x.sizes(), x.options());
  for_type(x, [&](auto number) {
    using T = decltype(number);
    const Scan<T> scan{
        out.template data_ptr<T>(), x.const_data_ptr<T>(), b.const_data_ptr<T>(), c.const_data_ptr<T>(),
        {dt.const_data_ptr<float>(), each_dt}, {a.const_data_ptr<float>(), each_a},
        {d.has_value() ? d->const_data_ptr<float>() : nullptr, each_d}, states.data_ptr<float>(), x.stride(0),
        b.stride(0), c.stride(0), dt.stride(0), states.stride(0), heads, rows, groups, columns, sequences};
    each_a ? selective_scan<T, true>(scan) : selective_scan<T, false>(scan);
  });
  return out;
}

}  // namespace pagewire
