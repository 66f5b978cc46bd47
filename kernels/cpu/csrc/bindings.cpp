// What Python sees: tensors in, tensors out. Shapes are checked here, because the code behind trusts its pointers.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>

#include "attention.h"
#include "grouped.h"
#include "layer.h"
#include "lora.h"
#include "matmul.h"
#include "sampling.h"

namespace pagewire {
namespace {

using at::Tensor;

template <typename F>
void for_type(const Tensor& tensor, const F& apply) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return apply(float());
    case at::kHalf: return apply(at::Half());
    case at::kBFloat16: return apply(at::BFloat16());
    default: TORCH_CHECK(false, "tensors must be float32, float16 or bfloat16, not ", tensor.scalar_type());
  }
}

// apply(tensor's type, other's type), of which the first must be float32 or the second.
template <typename F>
void for_types(const Tensor& tensor, const Tensor& other, const F& apply) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == other.scalar_type(),
              "a tensor of ", tensor.scalar_type(), " does not go with one of ", other.scalar_type());
  for_type(other, [&](auto type) {
    tensor.scalar_type() == at::kFloat ? apply(float(), type) : apply(type, type);
  });
}

void check_like(const Tensor& tensor, const Tensor& other, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == other.scalar_type(), name, " must be on the CPU and ",
              other.scalar_type());
}

void check_contiguous(const Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

void check_numbers(const Tensor& tensor, at::ScalarType type, int64_t count, const char* name) {
  check_contiguous(tensor, name);
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.numel() == count, name, " must be ",
              count, " numbers of ", type);
}

void check_rows(const Tensor& rows, int64_t count) {
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const auto row = rows.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(0 <= row && row < count, "there is no row ", row);
  }
}

// [tokens, heads, head_dim] with everything but the tokens packed.
void check_heads(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)), name,
              " must be [tokens, heads, head_dim] with packed heads");
}

void check_layer_cache(const Tensor& cache) {
  TORCH_CHECK(cache.dim() == 5 && cache.size(1) == 2 && cache.stride(4) == 1 && cache.stride(3) == cache.size(4) &&
                  cache.stride(2) == cache.size(3) * cache.size(4),
              "the cache must be [blocks, 2, block_size, num_kv_heads, head_dim] with packed tokens");
}

Tensor normalise(
    const Tensor& x, Tensor* residual, const Tensor& weight, double eps, double offset, at::ScalarType result) {
  const int64_t length = x.size(-1);
  TORCH_CHECK(x.device().is_cpu() && weight.device().is_cpu(), "x and weight must be on the CPU");
  check_contiguous(weight, "weight");
  TORCH_CHECK(x.stride(-1) == 1 && (x.dim() == 2 || x.dim() == 3) && weight.numel() == length,
              "x must be [rows, length] or [rows, heads, length] with packed vectors, and weight [length]");
  const bool heads = x.dim() == 3;
  auto out = at::empty(x.sizes(), x.options().dtype(result));
  for_types(x, weight, [&](auto x_type, auto type) {
    using X = decltype(x_type);
    using T = decltype(type);
    for_types(out, weight, [&](auto out_type, auto) {
      using Out = decltype(out_type);
      rms_norm<Out, X, T>(
          out.data_ptr<Out>(), x.const_data_ptr<X>(), residual == nullptr ? nullptr : residual->data_ptr<float>(),
          weight.const_data_ptr<T>(), x.size(0), heads ? x.size(1) : 1, length, x.stride(0), heads ? x.stride(1) : 0,
          static_cast<float>(eps), static_cast<float>(offset));
    });
  });
  return out;
}

Tensor rms_norm_op(
    const Tensor& x, const Tensor& weight, double eps, double offset, std::optional<at::ScalarType> dtype) {
  return normalise(x, nullptr, weight, eps, offset, dtype.value_or(weight.scalar_type()));
}

Tensor add_rms_norm_op(const Tensor& x, Tensor residual, const Tensor& weight, double eps, double offset) {
  check_contiguous(residual, "residual");
  TORCH_CHECK(residual.device().is_cpu() && residual.scalar_type() == at::kFloat, "residual must be on the CPU and Float");
  TORCH_CHECK(x.dim() == 2 && residual.sizes() == x.sizes(), "x and residual must be of one shape [rows, length]");
  return normalise(x, &residual, weight, eps, offset, weight.scalar_type());
}

void rotary_embedding_op(Tensor x, const Tensor& cos, const Tensor& sin) {
  check_heads(x, "x");
  check_contiguous(cos, "cos");
  check_contiguous(sin, "sin");
  TORCH_CHECK(cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat && cos.dim() == 2 &&
                  cos.sizes() == sin.sizes() && cos.size(0) == x.size(0) && 2 * cos.size(1) <= x.size(2),
              "cos and sin must be float32 [tokens, at most head_dim / 2]");
  for_type(x, [&](auto type) {
    using T = decltype(type);
    rotary_embedding<T>(
        x.data_ptr<T>(), x.stride(0), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), x.size(0), x.size(1),
        x.size(2), cos.size(1));
  });
}

void store_kv_op(const Tensor& keys, const Tensor& values, Tensor cache, const Tensor& slots) {
  check_heads(keys, "keys");
  check_heads(values, "values");
  check_layer_cache(cache);
  check_like(keys, cache, "keys");
  check_like(values, cache, "values");
  check_contiguous(slots, "slots");
  TORCH_CHECK(keys.sizes() == values.sizes() && keys.size(1) == cache.size(3) && keys.size(2) == cache.size(4) &&
                  slots.scalar_type() == at::kLong && slots.numel() == keys.size(0),
              "keys and values must be [tokens, num_kv_heads, head_dim] of the cache, and slots [tokens] int64");
  const int64_t size = keys.element_size();
  store_kv(
      static_cast<const char*>(keys.const_data_ptr()), keys.stride(0) * size,
      static_cast<const char*>(values.const_data_ptr()), values.stride(0) * size, static_cast<char*>(cache.data_ptr()),
      cache.stride(0) * size, cache.stride(1) * size, cache.size(2), slots.const_data_ptr<int64_t>(), keys.size(0),
      keys.size(1) * keys.size(2) * size);
}

Tensor gated_activation_op(const Tensor& x, const std::string& activation) {
  check_contiguous(x, "x");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) % 2 == 0, "x must be [..., gate and up]");
  auto sizes = x.sizes().vec();
  const int64_t length = sizes.back() /= 2;
  const int64_t rows = length == 0 ? 0 : x.numel() / (2 * length);
  auto out = at::empty(sizes, x.options());
  for_type(x, [&](auto type) {
    using T = decltype(type);
    const auto run = activation == "silu"        ? gated_activation<T, Activation::kSilu>
                     : activation == "gelu_tanh" ? gated_activation<T, Activation::kGeluTanh>
                                                 : gated_activation<T, Activation::kGelu>;
    TORCH_CHECK(activation == "silu" || activation == "gelu_tanh" || activation == "gelu", "no activation ",
                activation);
    run(out.data_ptr<T>(), x.const_data_ptr<T>(), rows, length);
  });
  return out;
}

void add_lora_op(
    Tensor y, const Tensor& x, const Tensor& slots, const Tensor& a, const Tensor& b, const Tensor& ranks,
    const std::vector<int64_t>& starts) {
  check_contiguous(y, "y");
  for (const auto* tensor : {&slots, &a, &b, &ranks}) check_contiguous(*tensor, "slots, a, b and ranks");
  check_like(a, x, "a");
  check_like(b, x, "b");
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && y.dim() == 2 && y.device().is_cpu() && y.size(0) == x.size(0),
              "x and y must be [rows, inputs] and [rows, outputs]");
  TORCH_CHECK(a.dim() == 4 && b.dim() == 3 && a.size(0) == b.size(0) && a.size(2) == b.size(1) &&
                  a.size(3) == x.size(1) && b.size(2) == y.size(1) && ranks.numel() == a.size(0) &&
                  ranks.scalar_type() == at::kInt && slots.scalar_type() == at::kInt && slots.numel() == x.size(0),
              "a, b, ranks and slots do not fit x and y");
  TORCH_CHECK(static_cast<int64_t>(starts.size()) == a.size(1) + 1 && starts.front() == 0 && starts.back() == y.size(1) &&
                  std::is_sorted(starts.begin(), starts.end()),
              "starts must go from 0 to the number of outputs");
  for (int64_t i = 0; i < ranks.numel(); ++i) {
    const auto rank = ranks.const_data_ptr<int32_t>()[i];
    TORCH_CHECK(rank >= 0 && rank <= a.size(2), "a rank is ", rank, ", and there is room for ", a.size(2));
  }
  for (int64_t i = 0; i < slots.numel(); ++i)
    TORCH_CHECK(slots.const_data_ptr<int32_t>()[i] < a.size(0), "there is no such slot");
  for_types(y, x, [&](auto y_type, auto type) {
    using Y = decltype(y_type);
    using T = decltype(type);
    add_lora<Y, T>(
        y.data_ptr<Y>(), x.const_data_ptr<T>(), x.stride(0), slots.const_data_ptr<int32_t>(), x.size(0),
        {a.const_data_ptr<T>(), b.const_data_ptr<T>(), ranks.const_data_ptr<int32_t>(), starts.data(), a.size(1),
         a.size(2), a.size(3), y.size(1)});
  });
}

std::tuple<Tensor, Tensor> greedy_op(const Tensor& x) {
  check_contiguous(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "x must be [rows, at least one column]");
  auto values = at::empty({x.size(0)}, x.options());
  auto indices = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  for_type(x, [&](auto type) {
    using T = decltype(type);
    greedy<T>(x.const_data_ptr<T>(), values.data_ptr<T>(), indices.data_ptr<int64_t>(), x.size(0), x.size(1));
  });
  return {indices, values};
}

// logits: [rows of all, vocabulary_size] float32; rows: [masks] int64, each once; bits: [masks, bytes].
void keep_op(const Tensor& logits, const Tensor& rows, const Tensor& bits) {
  TORCH_CHECK(logits.dim() == 2 && bits.dim() == 2 && bits.size(1) * 8 >= logits.size(1) &&
                  bits.scalar_type() == at::kByte && bits.size(0) == rows.numel(),
              "every row has a bit for every token");
  check_numbers(logits, at::kFloat, logits.numel(), "logits");
  check_numbers(rows, at::kLong, bits.size(0), "rows");
  check_contiguous(bits, "bits");
  check_rows(rows, logits.size(0));
  const auto* row = rows.const_data_ptr<int64_t>();
  auto* x = logits.data_ptr<float>();
  parallel_for(rows.numel(), rows_a_thread(logits.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      keep(x + row[i] * logits.size(1), bits.const_data_ptr<uint8_t>() + i * bits.size(1), logits.size(1));
  });
}

// logits: [rows, vocabulary_size]; largest: [rows] float32; rows, keys, top_k: [draws] int64; the others float32.
// log_min_p: torch's own logarithms, since the C library's differ from them in the last bit.
Tensor draw_op(
    const Tensor& logits, const Tensor& largest, const Tensor& rows, const Tensor& keys, const Tensor& temperature,
    const Tensor& log_min_p, const Tensor& top_k, const Tensor& top_p) {
  check_contiguous(logits, "logits");
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits must be [rows, at least one column]");
  const int64_t length = logits.size(1), draws = rows.numel();
  check_numbers(largest, at::kFloat, logits.size(0), "largest");
  for (const auto* tensor : {&rows, &keys, &top_k}) check_numbers(*tensor, at::kLong, draws, "rows, keys and top_k");
  for (const auto* tensor : {&temperature, &log_min_p, &top_p})
    check_numbers(*tensor, at::kFloat, draws, "temperature, min_p and top_p");
  check_rows(rows, logits.size(0));
  const auto *heat = temperature.const_data_ptr<float>(), *least = log_min_p.const_data_ptr<float>(),
             *nucleus = top_p.const_data_ptr<float>();
  for (int64_t i = 0; i < draws; ++i)
    TORCH_CHECK(heat[i] > 0 && std::isfinite(heat[i]) && least[i] <= 0 && !std::isnan(nucleus[i]), "draw ", i,
                ": temperature must be above 0 and finite, min_p in [0, 1], top_p a number");
  const auto* row = rows.const_data_ptr<int64_t>();
  auto out = at::empty({draws}, rows.options());
  for_type(logits, [&](auto type) {
    using T = decltype(type);
    const T* x = logits.const_data_ptr<T>();
    parallel_for(draws, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t i = begin; i < end; ++i) {
        const Draw draw{
            largest.const_data_ptr<float>()[row[i]], heat[i], least[i], nucleus[i],
            top_k.const_data_ptr<int64_t>()[i], static_cast<uint64_t>(keys.const_data_ptr<int64_t>()[i])};
        out.data_ptr<int64_t>()[i] = draw_one(x + row[i] * length, length, draw, scratch);
      }
    });
  });
  return out;
}

struct Metadata {
  const Tensor &query_start, &context_lens, &block_tables;
};

// query: [tokens, heads, head_dim]; returns [tokens, heads * head_dim].
Tensor attend(
    const Tensor& query, const Tensor& cache, const Metadata& metadata, double scale, int64_t window, double soft_cap,
    const std::optional<Tensor>& bias = std::nullopt, bool causal = true) {
  for (const auto* tensor : {&metadata.query_start, &metadata.context_lens, &metadata.block_tables}) {
    check_contiguous(*tensor, "metadata");
    TORCH_CHECK(tensor->scalar_type() == at::kInt, "metadata must be int32");
  }
  const int64_t sequences = metadata.context_lens.numel();
  TORCH_CHECK(query.size(2) == cache.size(4) && query.size(1) % cache.size(3) == 0 &&
                  metadata.block_tables.dim() == 2 && metadata.block_tables.size(0) == sequences &&
                  metadata.query_start.numel() == sequences + 1,
              "query, cache and metadata do not fit each other");
  const auto *starts = metadata.query_start.const_data_ptr<int32_t>(),
             *contexts = metadata.context_lens.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < sequences; ++i)
    TORCH_CHECK(starts[i] <= starts[i + 1] &&
                    (causal ? starts[i + 1] - starts[i] : starts[i + 1] > starts[i]) <= contexts[i] &&
                    contexts[i] <= metadata.block_tables.size(1) * cache.size(2),
                "sequence ", i, " has ", starts[i + 1] - starts[i], " query tokens of ", contexts[i], " and room for ",
                metadata.block_tables.size(1) * cache.size(2), " in its block table");
  TORCH_CHECK(starts[0] == 0 && starts[sequences] == query.size(0), "query_start does not fit the query");
  if (bias.has_value()) {
    check_contiguous(*bias, "bias");
    TORCH_CHECK(bias->device().is_cpu() && bias->scalar_type() == at::kFloat && bias->dim() == 2 &&
                    bias->size(0) == query.size(1) && bias->size(1) > 0,
                "bias must be float32 [num_heads, at least one distance]");
  }
  auto out = at::empty({query.size(0), query.size(1) * query.size(2)}, query.options());
  for_type(query, [&](auto type) {
    using T = decltype(type);
    const Attention<T> a{
        out.data_ptr<T>(), query.const_data_ptr<T>(), cache.const_data_ptr<T>(),
        metadata.query_start.const_data_ptr<int32_t>(), metadata.context_lens.const_data_ptr<int32_t>(),
        metadata.block_tables.const_data_ptr<int32_t>(), query.stride(0), cache.stride(0), cache.stride(1),
        metadata.block_tables.size(1), sequences, query.size(1), cache.size(3), query.size(2), cache.size(2),
        static_cast<float>(scale), static_cast<float>(soft_cap), window,
        bias.has_value() ? bias->template const_data_ptr<float>() : nullptr, bias.has_value() ? bias->size(1) : 0,
        causal};
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, at::BFloat16>)
      if (Bf16Tiles::can(a)) return paged_attention<T, Bf16Tiles>(a);
#endif
    paged_attention<T, FloatTiles<T>>(a);
  });
  return out;
}

Tensor paged_attention_op(
    const Tensor& query, const Tensor& cache, const Tensor& query_start, const Tensor& context_lens,
    const Tensor& block_tables, double scale, int64_t window, double soft_cap, const std::optional<Tensor>& bias,
    bool causal) {
  check_heads(query, "query");
  check_layer_cache(cache);
  check_like(query, cache, "query");
  return attend(query, cache, {query_start, context_lens, block_tables}, scale, window, soft_cap, bias, causal)
      .view(query.sizes());
}

Tensor qkv_attention_op(
    const Tensor& qkv, const std::optional<std::tuple<Tensor, Tensor>>& norms, double eps, double offset,
    const std::optional<std::tuple<Tensor, Tensor>>& rotation, Tensor cache, const Tensor& slots,
    const Tensor& query_start, const Tensor& context_lens, const Tensor& block_tables, double scale, int64_t window,
    double soft_cap) {
  check_contiguous(qkv, "qkv");
  check_layer_cache(cache);
  check_like(qkv, cache, "qkv");
  check_contiguous(slots, "slots");
  const int64_t tokens = qkv.size(0), num_kv_heads = cache.size(3), head_dim = cache.size(4);
  const int64_t num_heads = qkv.size(1) / head_dim - 2 * num_kv_heads;
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(1) % head_dim == 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
              "qkv and the cache do not fit each other");
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.numel() == tokens, "slots must be [tokens] int64");
  int64_t pairs = 0;
  if (norms.has_value())
    for (const auto* norm : {&std::get<0>(*norms), &std::get<1>(*norms)}) {
      check_like(*norm, qkv, "norms");
      check_contiguous(*norm, "norms");
      TORCH_CHECK(norm->numel() == head_dim, "norms must be [head_dim]");
    }
  if (rotation.has_value())
    for (const auto* angles : {&std::get<0>(*rotation), &std::get<1>(*rotation)}) {
      check_contiguous(*angles, "rotation");
      pairs = angles->size(1);
      TORCH_CHECK(angles->scalar_type() == at::kFloat && angles->dim() == 2 && angles->size(0) == tokens &&
                      angles->sizes() == std::get<0>(*rotation).sizes() && 2 * pairs <= head_dim,
                  "rotation must be float32 [tokens, at most head_dim / 2]");
    }
  const auto query = at::empty({tokens, num_heads, head_dim}, qkv.options());
  for_type(qkv, [&](auto type) {
    using T = decltype(type);
    prepare<T>({
        qkv.const_data_ptr<T>(), query.template data_ptr<T>(), norms.has_value() ? std::get<0>(*norms).template const_data_ptr<T>() : nullptr,
        norms.has_value() ? std::get<1>(*norms).template const_data_ptr<T>() : nullptr, static_cast<float>(eps),
        static_cast<float>(offset),
        rotation.has_value() ? std::get<0>(*rotation).template const_data_ptr<float>() : nullptr,
        rotation.has_value() ? std::get<1>(*rotation).template const_data_ptr<float>() : nullptr, pairs,
        cache.data_ptr<T>(), cache.stride(0), cache.stride(1), cache.size(2), slots.const_data_ptr<int64_t>(), tokens,
        num_heads, num_kv_heads, head_dim});
  });
  return attend(query, cache, {query_start, context_lens, block_tables}, scale, window, soft_cap);
}

// Whether there are products of packed weights with so many inputs.
bool can_pack(int64_t inputs) { return inputs % 2 == 0; }

// The same for int8 weights, which need bf16 dot products.
bool can_pack_int8(int64_t inputs) {
#if defined(__AVX512BF16__)
  return can_pack(inputs);
#else
  return false;
#endif
}

// weight: [outputs, inputs] of bf16; returns [panels, inputs / 2, 32, 2].
Tensor pack(const Tensor& weight) {
  TORCH_CHECK(weight.device().is_cpu() && weight.dim() == 2 && can_pack(weight.size(1)) &&
                  weight.scalar_type() == at::kBFloat16,
              "this weight cannot be packed");
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  auto packed = at::empty({panels_of(outputs), inputs / 2, kPanel, 2}, weight.options());
  const auto source = weight.contiguous();
  const auto* from = source.const_data_ptr<at::BFloat16>();
  auto* to = packed.data_ptr<at::BFloat16>();
  parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t input = 0; input < inputs; ++input)
        for (int64_t i = 0; i < kPanel; ++i) {
          const int64_t output = panel * kPanel + i;
          to[((panel * (inputs / 2) + input / 2) * kPanel + i) * 2 + input % 2] =
              output < outputs ? from[output * inputs + input] : at::BFloat16(0);
        }
  });
  return packed;
}

// weight: [outputs, inputs] of int8; scales: [outputs, groups] of bf16; returns [panels, groups, bytes of a group]. The
// last group of an output may have fewer weights than others.
Tensor pack_int8(const Tensor& weight, const Tensor& scales) {
  TORCH_CHECK(weight.device().is_cpu() && weight.dim() == 2 && can_pack_int8(weight.size(1)) &&
                  weight.scalar_type() == at::kChar,
              "this weight cannot be packed");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), groups = groups_of(inputs);
  TORCH_CHECK(scales.device().is_cpu() && scales.scalar_type() == at::kBFloat16 && scales.dim() == 2 &&
                  scales.size(0) == outputs && scales.size(1) == groups,
              "scales must be bf16 [", outputs, ", ", groups, "]");
  auto packed = at::zeros({panels_of(outputs), groups, static_cast<int64_t>(sizeof(Int8Group))}, weight.options());
  const auto numbers = weight.contiguous(), factors = scales.contiguous();
  const auto* from = numbers.const_data_ptr<int8_t>();
  const auto* from_scales = factors.const_data_ptr<at::BFloat16>();
  auto* to = reinterpret_cast<Int8Group*>(packed.data_ptr<int8_t>());
  parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin * kPanel; output < std::min(outputs, end * kPanel); ++output) {
      const int64_t place = output % kPanel;
      Int8Group* own = to + output / kPanel * groups;
      for (int64_t group = 0; group < groups; ++group) own[group].scales[place] = from_scales[output * groups + group];
      for (int64_t input = 0; input < inputs; ++input)
        own[input / kGroup].weights[input % kGroup / 2][place][input % 2] = from[output * inputs + input];
    }
  });
  return packed;
}

// Calls apply(a block's type) for weights of so many bits of which so many inputs share a scale, or returns false.
template <typename F>
bool for_block(int64_t bits, int64_t inputs, const F& apply) {
  if (bits == 4 && inputs == 32) return apply(Int4Block()), true;
  if (bits == 8 && inputs == 32) return apply(Int8Block()), true;
  if (bits == 8 && inputs == 16) return apply(FineInt8Block()), true;
  return false;
}

// numbers: [outputs, inputs] of uint8, below 2 to the power of `bits`; scales, minimums: [outputs, groups] of float16,
// for 32 or 16 inputs each; returns [panels, blocks, bytes of a block]. The last group of an output may have fewer
// weights than others.
Tensor pack_grouped(const Tensor& numbers, const Tensor& scales, const Tensor& minimums, int64_t bits) {
  TORCH_CHECK(numbers.device().is_cpu() && numbers.dim() == 2 && can_pack(numbers.size(1)) &&
                  numbers.scalar_type() == at::kByte && scales.dim() == 2,
              "this weight cannot be packed");
  const int64_t outputs = numbers.size(0), inputs = numbers.size(1), blocks = groups_of(inputs);
  const int64_t groups = scales.size(1), shared = groups == blocks ? kGroup : kGroup / 2;
  TORCH_CHECK(groups == (inputs + shared - 1) / shared, "there are ", groups, " groups of ", inputs, " inputs");
  check_contiguous(numbers, "numbers");
  check_numbers(scales, at::kHalf, outputs * groups, "scales");
  check_numbers(minimums, at::kHalf, outputs * groups, "minimums");
  const auto* from = numbers.const_data_ptr<uint8_t>();
  const auto *from_scales = scales.const_data_ptr<at::Half>(), *from_minimums = minimums.const_data_ptr<at::Half>();
  Tensor packed;
  const bool is_known = for_block(bits, shared, [&](auto kind) {
    using Block = decltype(kind);
    packed = at::zeros({panels_of(outputs), blocks, static_cast<int64_t>(sizeof(Block))}, numbers.options());
    auto* to = reinterpret_cast<Block*>(packed.data_ptr<uint8_t>());
    parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
      for (int64_t output = begin * kPanel; output < std::min(outputs, end * kPanel); ++output) {
        const int64_t place = output % kPanel, half = kPanel / 2;
        Block* own = to + output / kPanel * blocks;
        for (int64_t group = 0; group < groups; ++group) {
          auto& of_group = own[group / Block::kScales].groups[group % Block::kScales];
          of_group.scales[place] = from_scales[output * groups + group];
          of_group.minimums[place] = from_minimums[output * groups + group];
        }
        for (int64_t input = 0; input < inputs; ++input) {
          auto* row = own[input / kGroup].weights[input % kGroup / 4];
          const uint8_t number = from[output * inputs + input];
          if constexpr (Block::kBits == 8) {
            row[place][input % 4] = number;
          } else {
            row[place % half][input % 4] |= (number & 15) << (4 * (place / half));
          }
        }
      }
    });
  });
  TORCH_CHECK(is_known, "there are no products of weights with ", bits, " bits");
  return packed;
}

// packed: from `pack`, `pack_int8` or `pack_grouped`; wide: whether the result is float32.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs, bool wide) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kBFloat16, "x must be on the CPU and BFloat16");
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && can_pack(x.size(1)), "x must be [rows, inputs]");
  const int64_t inputs = x.size(1);
  const auto type = packed.scalar_type();
  const auto is_of = [&](auto... kinds) {
    return packed.dim() == 3 && packed.size(1) == groups_of(inputs) &&
           ((packed.size(2) == static_cast<int64_t>(sizeof(kinds))) || ...);
  };
  TORCH_CHECK(packed.size(0) == panels_of(outputs) &&
                  (type == at::kByte   ? is_of(Int4Block(), Int8Block(), FineInt8Block())
                   : type == at::kChar ? is_of(Int8Group())
                                       : packed.dim() == 4 && packed.size(1) == inputs / 2 && type == at::kBFloat16),
              "the weight was not packed for ", inputs, " inputs and ", outputs, " outputs");
  if (bias.has_value()) {
    check_like(*bias, x, "bias");
    check_contiguous(*bias, "bias");
    TORCH_CHECK(bias->numel() == outputs, "bias must be [outputs]");
  }
  auto out = at::empty({x.size(0), outputs}, x.options().dtype(wide ? at::kFloat : at::kBFloat16));
  const Results results{wide ? nullptr : out.data_ptr<at::BFloat16>(), wide ? out.data_ptr<float>() : nullptr};
  const auto* numbers = x.const_data_ptr<at::BFloat16>();
  const auto* added = bias.has_value() ? bias->const_data_ptr<at::BFloat16>() : nullptr;
  const Sizes sizes{x.size(0), inputs, outputs, x.stride(0)};
  if (type == at::kBFloat16) {
    multiply(Bf16Weights{packed.const_data_ptr<at::BFloat16>()}, numbers, sizes, added, results);
    return out;
  }
  if (type == at::kByte) {
    for (const auto& [bits, shared] : {std::pair(4, 32), std::pair(8, 32), std::pair(8, 16)})
      for_block(bits, shared, [&](auto kind) {
        using Block = decltype(kind);
        if (packed.size(2) == static_cast<int64_t>(sizeof(Block)))
          multiply_grouped(
              reinterpret_cast<const Block*>(packed.const_data_ptr<uint8_t>()), numbers, sizes, added, results);
      });
    return out;
  }
#if defined(__AVX512BF16__)
  multiply(Int8Weights{reinterpret_cast<const Int8Group*>(packed.const_data_ptr<int8_t>())}, numbers, sizes, added, results);
#else
  TORCH_CHECK(false, "there are no products of int8 weights without bf16 dot products");
#endif
  return out;
}

}  // namespace
}  // namespace pagewire

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("rms_norm", &pagewire::rms_norm_op, unlocked);
  module.def("add_rms_norm", &pagewire::add_rms_norm_op, unlocked);
  module.def("rotary_embedding", &pagewire::rotary_embedding_op, unlocked);
  module.def("store_kv", &pagewire::store_kv_op, unlocked);
  module.def("gated_activation", &pagewire::gated_activation_op, unlocked);
  module.def("add_lora", &pagewire::add_lora_op, unlocked);
  module.def("greedy", &pagewire::greedy_op, unlocked);
  module.def("keep", &pagewire::keep_op, unlocked);
  module.def("draw", &pagewire::draw_op, unlocked);
  module.def("paged_attention", &pagewire::paged_attention_op, unlocked);
  module.def("qkv_attention", &pagewire::qkv_attention_op, unlocked);
  module.def("can_pack", &pagewire::can_pack, unlocked);
  module.def("can_pack_int8", &pagewire::can_pack_int8, unlocked);
  module.def("pack", &pagewire::pack, unlocked);
  module.def("pack_int8", &pagewire::pack_int8, unlocked);
  module.def("pack_grouped", &pagewire::pack_grouped, unlocked);
  module.def("linear", &pagewire::linear, unlocked);
}
