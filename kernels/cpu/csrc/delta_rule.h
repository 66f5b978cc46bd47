// The gated delta rule, token by token. Defined in kernels/states.py.
//
// With S the state [key_dim, value_dim], d = exp(decay) and the row vectors k, v and q of a token:
//   change = beta * (v - (d * k) S),   out = (d * q) S + (q · k) * change,   S = d * S + kᵀ change
// Both products read S before the change, so one pass over S applies a token's change and multiplies by the next
// token's vectors. A thread does this for 2 or 4 vectors of columns, whose state stays in its L1 cache: 16 KiB with
// 128 rows and AVX-512. The order of all sums depends on key_dim alone.
#pragma once

#include "layer.h"
#include "sequences.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

template <typename T>
struct DeltaRule {
  T* out;              // [rows, value_heads, value_dim]
  const T *query, *key;  // [rows, key_heads, key_dim]
  const T* value;      // [rows, value_heads, value_dim]
  const float* decay;  // [rows, value_heads, decays], logarithms
  const float* beta;   // [rows, value_heads]; null: change = v
  float* states;       // [blocks, value_heads, key_dim, value_dim]
  int64_t query_stride, key_stride, value_stride, state_stride;  // of rows and blocks, in elements
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t decays;  // key_dim, or 1 if all rows of S have one
  bool normalize;
  Sequences sequences;
};

constexpr int64_t kStateVectors = kLanes == 16 ? 2 : 4;
constexpr int64_t kStateColumns = kStateVectors * kLanes;

// A token's vectors for one head, [key_dim] float32.
struct DeltaFactors {
  Buffer<float> decay, key, decayed_key, decayed_query;
  float product;  // q · k

  template <typename T>
  void prepare(const DeltaRule<T>& r, int64_t row, int64_t head) {
    const int64_t key_head = head / (r.value_heads / r.key_heads);
    const T* q = r.query + row * r.query_stride + key_head * r.key_dim;
    const T* k = r.key + row * r.key_stride + key_head * r.key_dim;
    const float* logarithms = r.decay + (row * r.value_heads + head) * r.decays;
    for (auto* factors : {&decay, &key, &decayed_key, &decayed_query}) factors->resize(r.key_dim);
    const auto scale = [&](const T* x) { return r.normalize ? 1 / std::sqrt(sum(sum_of_squares(x, r.key_dim)) + 1e-6f) : 1; };
    const Vec query_scale(scale(q) / std::sqrt(static_cast<float>(r.key_dim))), key_scale(scale(k));
    Vec products(0), one_decay = Vec(logarithms[0]).exp();
    for_each_vector(r.key_dim, [&](int64_t i, int64_t n) {
      const Vec scaled_query = widen(q + i, n) * query_scale, scaled_key = widen(k + i, n) * key_scale;
      const Vec d = r.decays == 1 ? one_decay : widen(logarithms + i, n).exp();
      products = at::vec::fmadd(scaled_query, scaled_key, products);
      d.store(&decay[i], n);
      scaled_key.store(&key[i], n);
      (r.beta == nullptr ? Vec(0) : scaled_key * d).store(&decayed_key[i], n);
      (scaled_query * d).store(&decayed_query[i], n);
    });
    product = sum(products);
  }
};

// Adds a token's change to a row of S.
inline Vec changed(const DeltaFactors& factors, int64_t i, const Vec& state, const Vec& change) {
  return at::vec::fmadd(Vec(factors.key[i]), change, Vec(factors.decay[i]) * state);
}

// One pass over S, [key_dim, kStateColumns]: applies the change of the token `before`, unless it is null, and multiplies
// both vectors of `factors` by S.
template <bool kChanges>
inline void pass_over_state(
    float* state, int64_t key_dim, const DeltaFactors* before, const Vec* change, const DeltaFactors& factors,
    Vec* with_key, Vec* with_query) {
  Vec changes[kStateVectors], key_sums[kStateVectors], query_sums[kStateVectors];  // registers
  for (int64_t j = 0; j < kStateVectors; ++j) {
    key_sums[j] = query_sums[j] = Vec(0);
    if constexpr (kChanges) changes[j] = change[j];
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    const Vec key(factors.decayed_key[i]), query(factors.decayed_query[i]);
    for (int64_t j = 0; j < kStateVectors; ++j) {
      float* place = state + i * kStateColumns + j * kLanes;
      Vec numbers = Vec::loadu(place);
      if constexpr (kChanges) {
        numbers = changed(*before, i, numbers, changes[j]);
        numbers.store(place);
      }
      key_sums[j] = at::vec::fmadd(key, numbers, key_sums[j]);
      query_sums[j] = at::vec::fmadd(query, numbers, query_sums[j]);
    }
  }
  for (int64_t j = 0; j < kStateVectors; ++j) {
    with_key[j] = key_sums[j];
    with_query[j] = query_sums[j];
  }
}

// All tokens of a sequence, for the columns [column, column + count) of a head.
template <typename T>
void advance(const DeltaRule<T>& r, int64_t sequence, int64_t head, int64_t column, int64_t count) {
  static thread_local Buffer<float> state;  // [key_dim, kStateColumns]
  static thread_local DeltaFactors factors[2];
  const int64_t begin = r.sequences.starts[sequence], end = r.sequences.starts[sequence + 1];
  if (begin == end) return;
  float* stored = r.states + r.sequences.block(sequence) * r.state_stride + head * r.key_dim * r.value_dim + column;
  state.assign(r.key_dim * kStateColumns, 0.0f);
  if (!r.sequences.is_new(sequence))
    for (int64_t i = 0; i < r.key_dim; ++i) std::copy_n(stored + i * r.value_dim, count, &state[i * kStateColumns]);
  Vec change[kStateVectors], with_key[kStateVectors], with_query[kStateVectors];
  for (int64_t row = begin; row < end; ++row) {
    DeltaFactors &now = factors[row % 2], &before = factors[(row + 1) % 2];
    now.prepare(r, row, head);
    if (row == begin)
      pass_over_state<false>(state.data(), r.key_dim, nullptr, nullptr, now, with_key, with_query);
    else
      pass_over_state<true>(state.data(), r.key_dim, &before, change, now, with_key, with_query);
    const Vec beta(r.beta == nullptr ? 1.0f : r.beta[row * r.value_heads + head]);
    for (int64_t j = 0; j * kLanes < count; ++j) {
      const int64_t place = head * r.value_dim + column + j * kLanes, n = std::min(kLanes, count - j * kLanes);
      change[j] = (widen(r.value + row * r.value_stride + place, n) - with_key[j]) * beta;
      store(
          r.out + row * r.value_heads * r.value_dim + place,
          at::vec::fmadd(Vec(now.product), change[j], with_query[j]), n);
    }
  }
  const DeltaFactors& last = factors[(end - 1) % 2];
  for (int64_t i = 0; i < r.key_dim; ++i)
    for_each_vector(count, [&](int64_t j, int64_t n) {
      store(
          stored + i * r.value_dim + j, changed(last, i, Vec::loadu(&state[i * kStateColumns + j]), change[j / kLanes]),
          n);
    });
}

template <typename T>
void gated_delta_rule(const DeltaRule<T>& r) {
  const int64_t parts = (r.value_dim + kStateColumns - 1) / kStateColumns, items = r.value_heads * parts;
  const int64_t tokens = r.sequences.starts[r.sequences.count] / std::max<int64_t>(1, r.sequences.count);
  parallel_for(r.sequences.count * items, rows_a_thread(r.key_dim * kStateColumns * tokens), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column = item % parts * kStateColumns;
      advance(r, item / items, item % items / parts, column, std::min(kStateColumns, r.value_dim - column));
    }
  });
}

}  // namespace pagewire
