// The selective scan of Mamba and Mamba-2, token by token. Defined in kernels/states.py.
//
// A row of the state has a channel of x, and a column for each number of B and C:
//   S = exp(dt * A) * S + (dt * x) B,   out = S · C + D * x
// A thread does this for 32 rows, whose state stays in its L1 cache: 16 KiB with 128 columns. The order of sums depends
// on the number of columns alone.
#pragma once

#include "sequences.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

// The numbers of a head: for each of its rows, or one for all.
struct ByHead {
  const float* numbers;
  bool each_row;

  float at(int64_t head, int64_t row) const { return numbers[each_row ? row : head]; }
};

template <typename T>
struct Scan {
  T* out;         // [tokens, rows]
  const T* x;     // [tokens, rows]
  const T *b, *c;  // [tokens, groups, columns]; a group is of consecutive heads
  ByHead dt;      // [tokens, heads] or [tokens, rows]
  ByHead a;       // [heads], or [rows, columns]
  ByHead d;       // [heads] or [rows]; or null
  float* states;  // [blocks, rows, columns]
  int64_t x_stride, b_stride, c_stride, dt_stride, state_stride;  // of tokens and blocks, in elements
  int64_t heads, rows, groups, columns;
  Sequences sequences;
};

constexpr int64_t kScannedRows = 32;
constexpr int kScannedTogether = 4;  // rows that share vectors of B and C

// A token's factors of up to kScannedRows rows.
struct ScanFactors {
  float dt[kScannedRows];
  float decay[kScannedRows];  // exp(dt * A), if A is one number
  float input[kScannedRows];  // dt * x
};

// Advances kRows rows; `a` is their part of A if A has columns. Returns the products S · C in sums.
template <int kRows, bool kColumnsDecay>
inline void scan_rows(
    float* state, int64_t columns, const float* a, const ScanFactors& factors, int64_t row, const float* b,
    const float* c, float* sums) {
  Vec products[kRows];
  for (auto& one : products) one = Vec(0);
  for_each_vector(columns, [&](int64_t i, int64_t n) {
    const Vec in = widen(b + i, n), out = widen(c + i, n);
    for (int k = 0; k < kRows; ++k) {
      float* place = state + (row + k) * columns + i;
      const Vec decay = kColumnsDecay ? (Vec(factors.dt[row + k]) * widen(a + (row + k) * columns + i, n)).exp()
                                      : Vec(factors.decay[row + k]);
      const Vec numbers = at::vec::fmadd(Vec(factors.input[row + k]), in, decay * widen(place, n));
      store(place, numbers, n);
      products[k] = at::vec::fmadd(numbers, out, products[k]);
    }
  });
  for (int k = 0; k < kRows; ++k) sums[row + k] = sum(products[k]);
}

// As float32: itself, or a copy.
template <typename T>
inline const float* widened(const T* numbers, int64_t count, Buffer<float>& copy) {
  if constexpr (std::is_same_v<T, float>) return numbers;
  copy.resize(count);
  for_each_vector(count, [&](int64_t i, int64_t n) { widen(numbers + i, n).store(&copy[i], n); });
  return copy.data();
}

// All tokens of a sequence, for rows [first, first + count) of a group.
template <typename T, bool kColumnsDecay>
void scan(const Scan<T>& s, int64_t sequence, int64_t group, int64_t first, int64_t count) {
  static thread_local Buffer<float> wide_b, wide_c;
  ScanFactors factors = {};
  float sums[kScannedRows], each_a[kScannedRows], each_d[kScannedRows];
  int64_t heads[kScannedRows];
  const int64_t tokens = s.sequences.tokens(sequence), size = s.rows / s.heads;
  if (tokens == 0) return;
  float* state = s.states + s.sequences.block(sequence) * s.state_stride + first * s.columns;
  if (s.sequences.is_new(sequence)) std::fill_n(state, count * s.columns, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    heads[i] = (first + i) / size;
    each_a[i] = kColumnsDecay ? 0 : s.a.numbers[heads[i]];
    each_d[i] = s.d.numbers == nullptr ? 0 : s.d.at(heads[i], first + i);
  }
  const float* a = s.a.numbers + first * s.columns;  // if kColumnsDecay
  for (int64_t token = s.sequences.starts[sequence]; token < s.sequences.starts[sequence + 1]; ++token) {
    const float* b = widened(s.b + token * s.b_stride + group * s.columns, s.columns, wide_b);
    const float* c = widened(s.c + token * s.c_stride + group * s.columns, s.columns, wide_c);
    const T* x = s.x + token * s.x_stride + first;
    const float* dt = s.dt.numbers + token * s.dt_stride;
    for (int64_t i = 0; i < count; ++i) {
      factors.dt[i] = dt[s.dt.each_row ? first + i : heads[i]];
      factors.input[i] = factors.dt[i] * static_cast<float>(x[i]);
      factors.decay[i] = factors.dt[i] * each_a[i];
    }
    if constexpr (!kColumnsDecay)
      for_each_vector(count, [&](int64_t i, int64_t n) { widen(factors.decay + i, n).exp().store(factors.decay + i, n); });
    int64_t row = 0;
    for (; row + kScannedTogether <= count; row += kScannedTogether)
      scan_rows<kScannedTogether, kColumnsDecay>(state, s.columns, a, factors, row, b, c, sums);
    for (; row < count; ++row) scan_rows<1, kColumnsDecay>(state, s.columns, a, factors, row, b, c, sums);
    T* out = s.out + token * s.rows + first;
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(std::fma(each_d[i], static_cast<float>(x[i]), sums[i]));
  }
}

template <typename T, bool kColumnsDecay>
void selective_scan(const Scan<T>& s) {
  const int64_t rows = s.rows / s.groups, parts = (rows + kScannedRows - 1) / kScannedRows, items = s.groups * parts;
  const int64_t tokens = s.sequences.starts[s.sequences.count] / std::max<int64_t>(1, s.sequences.count);
  parallel_for(s.sequences.count * items, rows_a_thread(kScannedRows * s.columns * tokens), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item % items / parts, row = item % parts * kScannedRows;
      scan<T, kColumnsDecay>(s, item / items, group, group * rows + row, std::min(kScannedRows, rows - row));
    }
  });
}

}  // namespace pagewire
