// A decoder layer's operations besides attention and products, each one pass over its rows. Defined in
// kernels/reference.py.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "kv_pool.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

// RMSNorm of a row. squares: sums of x's squares by vector lane. out may be x.
template <typename Out, typename X, typename W>
inline void scale_to_rms(
    Out* out, const X* x, const W* weight, int64_t length, const Vec& squares, float eps, float offset) {
  const Vec scale(1.0f / std::sqrt(sum(squares) / static_cast<float>(length) + eps));
  for_each_vector(length, [&](int64_t i, int64_t n) {
    store(out + i, widen(x + i, n) * scale * (widen(weight + i, n) + Vec(offset)), n);
  });
}

template <typename T>
inline Vec sum_of_squares(const T* x, int64_t length) {
  Vec squares(0.0f);
  for_each_vector(length, [&](int64_t i, int64_t n) {
    const Vec value = widen(x + i, n);
    squares = at::vec::fmadd(value, value, squares);
  });
  return squares;
}

// RMSNorm of rows. x: [outer, inner, length] with strides; out: contiguous. residual: [outer * inner, length], to which
// x is first added, or null.
template <typename Out, typename X, typename W>
void rms_norm(
    Out* out, const X* x, float* residual, const W* weight, int64_t outer, int64_t inner, int64_t length,
    int64_t outer_stride, int64_t inner_stride, float eps, float offset) {
  parallel_for(outer * inner, rows_a_thread(length), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const X* source = x + row / inner * outer_stride + row % inner * inner_stride;
      Out* normed = out + row * length;
      if (residual == nullptr) {
        scale_to_rms(normed, source, weight, length, sum_of_squares(source, length), eps, offset);
        continue;
      }
      float* target = residual + row * length;
      Vec squares(0.0f);
      for_each_vector(length, [&](int64_t i, int64_t n) {
        const Vec value = widen(target + i, n) + widen(source + i, n);
        store(target + i, value, n);
        squares = at::vec::fmadd(value, value, squares);
      });
      scale_to_rms(normed, target, weight, length, squares, eps, offset);
    }
  });
}

// Rotates the first 2 * pairs elements of a head. cos, sin: [pairs]. out may be head.
template <typename Out, typename X>
void rotate(Out* out, const X* head, const float* cos, const float* sin, int64_t pairs) {
  for_each_vector(pairs, [&](int64_t i, int64_t n) {
    const Vec first = widen(head + i, n), second = widen(head + pairs + i, n);
    const Vec c = widen(cos + i, n), s = widen(sin + i, n);
    store(out + i, first * c - second * s, n);
    store(out + pairs + i, second * c + first * s, n);
  });
}

// x: [tokens, heads, head_dim], tokens `stride` elements apart. cos, sin: [tokens, pairs].
template <typename T>
void rotary_embedding(
    T* x, int64_t stride, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t head_dim,
    int64_t pairs) {
  parallel_for(tokens, rows_a_thread(heads * head_dim), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (int64_t number = 0; number < heads; ++number) {
        T* head = x + token * stride + number * head_dim;
        rotate(head, head, cos + token * pairs, sin + token * pairs, pairs);
      }
  });
}

// Writes keys and values [num_kv_heads, head_dim] of each token into its slot; negative slots are skipped.
template <typename T>
void store_kv(
    const T* keys, int64_t key_stride, const T* values, int64_t value_stride, const KvPool<T>& cache,
    int64_t block_size, const int64_t* slots, int64_t tokens, int64_t num_kv_heads, int64_t head_dim) {
  const int64_t size = num_kv_heads * head_dim;
  parallel_for(tokens, rows_a_thread(size), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (slots[token] < 0) continue;
      const int64_t place = cache.place(slots[token], block_size, num_kv_heads, head_dim);
      for (const auto& [source, part] :
           {std::pair(keys + token * key_stride, place), std::pair(values + token * value_stride, place + cache.part_stride)}) {
        if (cache.narrow == nullptr) {
          std::copy_n(source, size, cache.wide + part);
        } else {
          for (int64_t head = 0; head < num_kv_heads; ++head)
            narrow_head(source + head * head_dim, head_dim, cache.narrow + part + head * cache.head_size(head_dim));
        }
      }
    }
  });
}

// Prepares attention from a fused QKV projection: query and key heads are normalised and rotated in float32 if norms or
// cos and sin are given. Queries are then rounded into a tensor, keys and values into their slots of the KV cache.
template <typename T>
struct Projection {
  const T* qkv;  // [tokens, num_heads + 2 * num_kv_heads, head_dim]
  T* query;      // [tokens, num_heads, head_dim]
  const T *query_norm, *key_norm;
  float eps, offset;
  const float *cos, *sin;  // [tokens, pairs]
  int64_t pairs;
  KvPool<T> cache;
  int64_t block_size;
  const int64_t* slots;
  int64_t tokens, num_heads, num_kv_heads, head_dim;
};

template <typename T>
void prepare(const Projection<T>& p) {
  const int64_t all_heads = p.num_heads + 2 * p.num_kv_heads;
  parallel_for(p.tokens, rows_a_thread(all_heads * p.head_dim), [&](int64_t begin, int64_t end) {
    static thread_local Buffer<float> normed;
    static thread_local Buffer<T> rounded;
    normed.resize(p.head_dim);
    rounded.resize(p.head_dim);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = p.slots[token];
      const int64_t place = p.cache.place(slot, p.block_size, p.num_kv_heads, p.head_dim);
      for (int64_t number = 0; number < (slot < 0 ? p.num_heads : all_heads); ++number) {
        const T* head = p.qkv + (token * all_heads + number) * p.head_dim;
        const int64_t stored = number - p.num_heads;  // number among the key heads, then the value heads
        const bool is_value = stored >= p.num_kv_heads;
        const int64_t kept = place + stored % p.num_kv_heads * p.cache.head_size(p.head_dim) +
                             (is_value ? p.cache.part_stride : 0);
        const bool narrows = stored >= 0 && p.cache.narrow != nullptr;
        T* target = stored < 0 ? p.query + (token * p.num_heads + number) * p.head_dim
                    : narrows  ? rounded.data()
                               : p.cache.wide + kept;
        const auto turn = [&](const auto* source, int64_t pairs) {
          rotate(target, source, p.cos + token * pairs, p.sin + token * pairs, pairs);
          for_each_vector(p.head_dim - 2 * pairs, [&](int64_t i, int64_t n) {
            store(target + 2 * pairs + i, widen(source + 2 * pairs + i, n), n);
          });
        };
        if (is_value || p.query_norm == nullptr) {
          turn(head, is_value ? 0 : p.pairs);
        } else {
          scale_to_rms(
              normed.data(), head, stored < 0 ? p.query_norm : p.key_norm, p.head_dim, sum_of_squares(head, p.head_dim),
              p.eps, p.offset);
          turn(normed.data(), p.pairs);
        }
        if (narrows) narrow_head(target, p.head_dim, p.cache.narrow + kept);
      }
    }
  });
}

enum class Activation { kSilu, kGeluTanh, kGelu, kSigmoid, kSoftplus };

template <Activation kKind>
inline Vec activate(const Vec& x) {
  const Vec one(1.0f), half(0.5f);
  if constexpr (kKind == Activation::kSilu) return x / (one + x.neg().exp());
  if constexpr (kKind == Activation::kSigmoid) return one / (one + x.neg().exp());
  if constexpr (kKind == Activation::kSoftplus)  // log(1 + exp(x)), which cannot overflow
    return at::vec::maximum(x, Vec(0.0f)) + x.abs().neg().exp().log1p();
  if constexpr (kKind == Activation::kGeluTanh)
    return half * x * (one + (Vec(0.7978845608f) * (x + Vec(0.044715f) * x * x * x)).tanh());
  return half * x * (one + (x * Vec(0.7071067812f)).erf());
}

// activation(gate) * up. x: [rows, 2 * length], gate then up. out: [rows, length].
template <typename T, Activation kKind>
void gated_activation(T* out, const T* x, int64_t rows, int64_t length) {
  parallel_for(rows, rows_a_thread(length), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gate = x + row * 2 * length, *up = gate + length;
      for_each_vector(length, [&](int64_t i, int64_t n) {
        store(out + row * length + i, activate<kKind>(widen(gate + i, n)) * widen(up + i, n), n);
      });
    }
  });
}

// (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within ±limit. x: [rows, 2 * length], gate
// and up in turn. out: [rows, length].
template <typename T>
void clamped_swiglu(T* out, const T* x, int64_t rows, int64_t length, float alpha, float limit) {
  const Vec one(1.0f), most(limit), least(-limit), slope(-alpha);
  parallel_for(rows, rows_a_thread(length), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* source = x + row * 2 * length;
      for_each_vector(length, [&](int64_t i, int64_t n) {
        const T* pairs = source + 2 * i;
        auto [gate, up] = at::vec::deinterleave2(
            widen(pairs, std::min(2 * n, kLanes)), widen(pairs + kLanes, std::max<int64_t>(2 * n - kLanes, 0)));
        gate = at::vec::minimum(gate, most);
        up = at::vec::maximum(at::vec::minimum(up, most), least);
        store(out + row * length + i, (up + one) * (gate / (one + (gate * slope).exp())), n);
      });
    }
  });
}

// The largest number of x; NaN if any is NaN, -inf if x is empty.
template <typename T>
inline float row_max(const T* x, int64_t length) {
  const int64_t whole = length / kLanes * kLanes;
  Vec best(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < whole; i += kLanes) best = at::vec::maximum(best, widen(x + i));
  float value = largest(best);
  for (int64_t i = whole; i < length; ++i) {
    const auto candidate = static_cast<float>(x[i]);
    if (std::isnan(candidate) || candidate > value) value = candidate;
  }
  return value;
}

// Each row's largest number (NaN if any is NaN), and its first index. x: [rows, length].
template <typename T>
void greedy(const T* x, T* values, int64_t* indices, int64_t rows, int64_t length) {
  constexpr int64_t kScanned = 1024;  // only the chunk with the largest is searched element by element
  parallel_for(rows, rows_a_thread(length), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* source = x + row * length;
      float value = -std::numeric_limits<float>::infinity();
      int64_t index = 0;
      for (int64_t start = 0; start < length && !std::isnan(value); start += kScanned) {
        const float candidate = row_max(source + start, std::min(kScanned, length - start));
        if (candidate > value || std::isnan(candidate)) {
          value = candidate;
          index = start;
        }
      }
      const auto found = [&](T x) {
        return std::isnan(value) ? std::isnan(static_cast<float>(x)) : static_cast<float>(x) == value;
      };
      while (!found(source[index])) ++index;
      values[row] = static_cast<T>(value);
      indices[row] = index;
    }
  });
}

}  // namespace pagewire
