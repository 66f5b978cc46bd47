// The Python module of the CPU kernels. Checks tensors' shapes, because the kernels do not check pointers.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "attention.h"
#include "checks.h"
#include "layer.h"
#include "lora.h"
#include "packing.h"
#include "sampling.h"
#include "states.h"

namespace pagewire {
namespace {

using at::Tensor;

// [tokens, heads, head_dim], contiguous but for the stride between tokens.
void check_heads(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)), name,
              " must be [tokens, heads, head_dim] with packed heads");
}

// A layer's KV cache has the element type of `like`, or heads in 8 bits.
void check_layer_cache(const Tensor& cache, const Tensor& like) {
  TORCH_CHECK(cache.dim() == 5 && (cache.size(1) == 2 || cache.size(1) == 1) && cache.stride(4) == 1 &&
                  cache.stride(3) == cache.size(4) && cache.stride(2) == cache.size(3) * cache.size(4),
              "the cache must be [blocks, 2 or 1, block_size, num_kv_heads, head_dim] with packed tokens");
  if (cache.scalar_type() == at::kChar) {
    TORCH_CHECK(cache.device().is_cpu() && like.device().is_cpu(), "a cache in 8 bits is for the CPU");
    TORCH_CHECK(cache.size(4) > kScaleBytes, "in a cache in 8 bits each head has a scale");
  } else {
    check_like(like, cache, "what the cache is for");
  }
}

int64_t head_dim_of(const Tensor& cache) {
  return cache.size(4) - (cache.scalar_type() == at::kChar ? kScaleBytes : 0);
}

template <typename T>
KvPool<T> pool_of(const Tensor& cache) {
  const bool narrow = cache.scalar_type() == at::kChar;
  return {narrow ? nullptr : cache.data_ptr<T>(), narrow ? cache.data_ptr<int8_t>() : nullptr, cache.stride(0),
          cache.size(1) == 1 ? 0 : cache.stride(1)};
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
  check_layer_cache(cache, keys);
  check_like(values, keys, "values");
  check_contiguous(slots, "slots");
  TORCH_CHECK(keys.sizes() == values.sizes() && keys.size(1) == cache.size(3) && keys.size(2) == head_dim_of(cache) &&
                  slots.scalar_type() == at::kLong && slots.numel() == keys.size(0),
              "keys and values must be [tokens, num_kv_heads, head_dim] of the cache, and slots [tokens] int64");
  for_type(keys, [&](auto type) {
    using T = decltype(type);
    store_kv<T>(
        keys.const_data_ptr<T>(), keys.stride(0), values.const_data_ptr<T>(), values.stride(0), pool_of<T>(cache),
        cache.size(2), slots.const_data_ptr<int64_t>(), keys.size(0), keys.size(1), keys.size(2));
  });
}

// x: [..., 2 * length]. Calls run(out, x, rows, length), and returns out, [..., length].
template <typename F>
Tensor gate(const Tensor& x, const F& run) {
  check_contiguous(x, "x");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) % 2 == 0, "x must be [..., gate and up]");
  auto sizes = x.sizes().vec();
  const int64_t length = sizes.back() /= 2;
  const int64_t rows = length == 0 ? 0 : x.numel() / (2 * length);
  auto out = at::empty(sizes, x.options());
  for_type(x, [&](auto type) {
    using T = decltype(type);
    run(out.data_ptr<T>(), x.const_data_ptr<T>(), rows, length);
  });
  return out;
}

Tensor gated_activation_op(const Tensor& x, const std::string& activation) {
  return gate(x, [&](auto* out, const auto* source, int64_t rows, int64_t length) {
    using T = std::remove_pointer_t<decltype(out)>;
    using enum Activation;
    using Run = void (*)(T*, const T*, int64_t, int64_t);
    static const std::map<std::string, Run> kRuns{
        {"silu", gated_activation<T, kSilu>},
        {"gelu_tanh", gated_activation<T, kGeluTanh>},
        {"gelu", gated_activation<T, kGelu>},
        {"sigmoid", gated_activation<T, kSigmoid>},
        {"softplus", gated_activation<T, kSoftplus>}};
    const auto run = kRuns.find(activation);
    TORCH_CHECK(run != kRuns.end(), "no activation ", activation);
    run->second(out, source, rows, length);
  });
}

Tensor clamped_swiglu_op(const Tensor& x, double alpha, double limit) {
  return gate(x, [&](auto* out, const auto* source, int64_t rows, int64_t length) {
    clamped_swiglu(out, source, rows, length, static_cast<float>(alpha), static_cast<float>(limit));
  });
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

// logits: [all rows, vocabulary_size] float32. rows: [masks] int64, distinct. bits: [masks, bytes].
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

// logits: [rows, vocabulary_size]. largest: [rows] float32. rows, keys, top_k: [draws] int64; others: [draws] float32.
// log_min_p comes from torch, because the C library's logarithms may differ in the last bit.
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

// query: [tokens, heads, head_dim]. Returns [tokens, heads * head_dim].
Tensor attend(
    const Tensor& query, const Tensor& cache, const Metadata& metadata, double scale, int64_t window, double soft_cap,
    const std::optional<Tensor>& bias = std::nullopt, bool causal = true,
    const std::optional<Tensor>& sinks = std::nullopt, bool chunked = false,
    const std::optional<Tensor>& visible_ends = std::nullopt) {
  for (const auto* tensor : {&metadata.query_start, &metadata.context_lens, &metadata.block_tables}) {
    check_contiguous(*tensor, "metadata");
    TORCH_CHECK(tensor->scalar_type() == at::kInt, "metadata must be int32");
  }
  const int64_t sequences = metadata.context_lens.numel();
  TORCH_CHECK(query.size(2) == head_dim_of(cache) && query.size(1) % cache.size(3) == 0 &&
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
  TORCH_CHECK(!chunked || window > 0, "chunked attention needs the size of a chunk (window)");
  TORCH_CHECK(starts[0] == 0 && starts[sequences] == query.size(0), "query_start does not fit the query");
  if (bias.has_value()) {
    check_contiguous(*bias, "bias");
    TORCH_CHECK(bias->device().is_cpu() && bias->scalar_type() == at::kFloat && bias->dim() == 2 &&
                    bias->size(0) == query.size(1) && bias->size(1) > 0,
                "bias must be float32 [num_heads, at least one distance]");
  }
  if (sinks.has_value()) check_numbers(*sinks, at::kFloat, query.size(1), "sinks");
  if (visible_ends.has_value()) {
    check_numbers(*visible_ends, at::kInt, query.size(0), "visible_ends");
    TORCH_CHECK(causal && !chunked && !bias.has_value(),
                "visible_ends exclude a bias, chunks, and attention that is not causal");
    const auto* ends = visible_ends->const_data_ptr<int32_t>();
    for (int64_t i = 0; i < sequences; ++i)
      for (int64_t row = starts[i]; row < starts[i + 1]; ++row)
        TORCH_CHECK(contexts[i] - (starts[i + 1] - row) <= ends[row] && ends[row] < contexts[i],
                    "row ", row, " of the query cannot end at position ", ends[row]);
  }
  auto out = at::empty({query.size(0), query.size(1) * query.size(2)}, query.options());
  for_type(query, [&](auto type) {
    using T = decltype(type);
    const Attention<T> a{
        out.data_ptr<T>(), query.const_data_ptr<T>(), pool_of<T>(cache),
        metadata.query_start.const_data_ptr<int32_t>(), metadata.context_lens.const_data_ptr<int32_t>(),
        metadata.block_tables.const_data_ptr<int32_t>(), query.stride(0),
        metadata.block_tables.size(1), sequences, query.size(1), cache.size(3), query.size(2), cache.size(2),
        static_cast<float>(scale), static_cast<float>(soft_cap), window,
        bias.has_value() ? bias->template const_data_ptr<float>() : nullptr, bias.has_value() ? bias->size(1) : 0,
        causal, sinks.has_value() ? sinks->template const_data_ptr<float>() : nullptr, chunked,
        visible_ends.has_value() ? visible_ends->template const_data_ptr<int32_t>() : nullptr};
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, at::BFloat16>) {
#if defined(__AVX512VNNI__)
      if (Int8Tiles::can(a)) return paged_attention<T, Int8Tiles>(a);
#endif
      if (Bf16Tiles::can(a)) return paged_attention<T, Bf16Tiles>(a);
    }
#endif
    paged_attention<T, FloatTiles<T>>(a);
  });
  return out;
}

Tensor paged_attention_op(
    const Tensor& query, const Tensor& cache, const Tensor& query_start, const Tensor& context_lens,
    const Tensor& block_tables, double scale, int64_t window, double soft_cap, const std::optional<Tensor>& bias,
    bool causal, const std::optional<Tensor>& sinks, bool chunked, const std::optional<Tensor>& visible_ends) {
  check_heads(query, "query");
  check_layer_cache(cache, query);
  return attend(
             query, cache, {query_start, context_lens, block_tables}, scale, window, soft_cap, bias, causal, sinks,
             chunked, visible_ends)
      .view(query.sizes());
}

Tensor qkv_attention_op(
    const Tensor& qkv, const std::optional<std::tuple<Tensor, Tensor>>& norms, double eps, double offset,
    const std::optional<std::tuple<Tensor, Tensor>>& rotation, Tensor cache, const Tensor& slots,
    const Tensor& query_start, const Tensor& context_lens, const Tensor& block_tables, double scale, int64_t window,
    double soft_cap, const std::optional<Tensor>& sinks, bool chunked, const std::optional<Tensor>& visible_ends) {
  check_contiguous(qkv, "qkv");
  check_layer_cache(cache, qkv);
  check_contiguous(slots, "slots");
  const int64_t tokens = qkv.size(0), num_kv_heads = cache.size(3), head_dim = head_dim_of(cache);
  const int64_t num_heads = qkv.size(1) / head_dim - 2 * num_kv_heads;
  TORCH_CHECK(cache.size(1) == 2 && qkv.dim() == 2 && qkv.size(1) % head_dim == 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
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
        pool_of<T>(cache), cache.size(2), slots.const_data_ptr<int64_t>(), tokens,
        num_heads, num_kv_heads, head_dim});
  });
  return attend(
      query, cache, {query_start, context_lens, block_tables}, scale, window, soft_cap, std::nullopt, true, sinks,
      chunked, visible_ends);
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
  module.def("clamped_swiglu", &pagewire::clamped_swiglu_op, unlocked);
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
  module.def("pack_w8a8", &pagewire::pack_w8a8, unlocked);
  module.def("pack_mx_float4", &pagewire::pack_mx_float4, unlocked);
  module.def("packed_rows", &pagewire::packed_rows, unlocked);
  module.def("linear", &pagewire::linear, unlocked);
  module.def("short_convolution", &pagewire::short_convolution, unlocked);
  module.def("gated_delta_rule", &pagewire::gated_delta_rule, unlocked);
  module.def("selective_scan", &pagewire::selective_scan, unlocked);
}
