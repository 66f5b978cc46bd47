// Tile engine for attention in bf16, with the bf16 dot product of AVX-512.
#pragma once

#if defined(__AVX512BF16__)

#include <cstring>

#include "attention_tiles.h"
#include "attention_words.h"

namespace pagewire {

// Multiplies pairs of bf16 numbers and adds in float32. head_dim must be a multiple of 32.
class Bf16Tiles {
 public:
  using T = at::BFloat16;
  static constexpr bool kMultipliesNarrow = false;

  static bool can(const Attention<T>& a) { return a.head_dim % 32 == 0; }

  void start(const Attention<T>& a, int64_t rows) {
    pairs_ = a.head_dim / 2;
    queries_.resize(rows * pairs_);
    keys_.resize(pairs_ * kTileKeys);
    values_.resize(kTileKeys / 2 * a.head_dim);
    weights_.resize(rows * kTileKeys / 2);
  }

  void load_query(int64_t row, const T* query) { std::memcpy(&queries_[row * pairs_], query, pairs_ * 4); }

  void score(int64_t rows, const Tile<T>& tile, float* scores) {
    for (int64_t group = 0; group < tile.count; group += 16) {
      for (int64_t pair = 0; pair < pairs_; pair += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(tile.keys[group + i] + 2 * pair);
        transpose_words(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(&keys_[(pair + i) * kTileKeys + group], r[i]);
      }
    }
    for_columns(tile.count, [&](auto vectors) { score_columns<vectors()>(rows, scores); });
  }

  // 2 ** x with a relative error of at most 1 in 9,000; weights are then rounded to bf16, at 1 in 500. 0 for -inf, NaN
  // for NaN. Coefficients minimise the squared relative error at Chebyshev's points of [-1/2, 1/2]; the constant term
  // is 1.
  static constexpr float kLogBase = 0.6931471806f;
  static Vec power(const Vec& x) {
    // max returns its second argument for NaN
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-160.0f), x);
    const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT);
    const __m512 part = _mm512_sub_ps(bounded, whole);
    __m512 value = _mm512_fmadd_ps(part, _mm512_set1_ps(0.0545928247f), _mm512_set1_ps(0.242217838f));
    value = _mm512_fmadd_ps(part, value, _mm512_set1_ps(0.693368601f));
    value = _mm512_fmadd_ps(part, value, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(value, whole);
  }

  void keep_weights(int64_t row, int64_t i, const Vec& weights) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(&weights_[(row * kTileKeys + i) / 2]), (__m256i)_mm512_cvtneps_pbh(weights));
  }

  void add_values(int64_t rows, const Tile<T>& tile, const float* corrections, float* sums) {
    const int64_t head_dim = 2 * pairs_, key_pairs = (tile.count + 1) / 2;
    if (rows > kSumRows) {
      for (int64_t pair = 0; pair < key_pairs; ++pair)
        for (int v = 0; v < head_dim / 16; ++v)
          _mm512_storeu_si512(&values_[pair * head_dim + v * 16], interleaved(tile, pair, v * 16));
    }
    int64_t column = 0;
    for (; column + 64 <= head_dim; column += 64) add_columns<4>(rows, tile, column, key_pairs, corrections, sums);
    if (column < head_dim) add_columns<2>(rows, tile, column, key_pairs, corrections, sums);
  }

 private:
  static __m512 multiply(__m512 sum, __m512i left, __m512i right) {
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
  }

  // The values of two neighbouring keys in 16 columns, interleaved as pairs of bf16.
  [[gnu::always_inline]] static __m512i interleaved(const Tile<T>& tile, int64_t pair, int64_t column) {
    const auto* even = reinterpret_cast<const __m256i*>(tile.values[2 * pair] + column);
    const auto* odd = reinterpret_cast<const __m256i*>(tile.values[2 * pair + 1] + column);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(even));
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(odd)), 16);
    return _mm512_or_si512(low, high);
  }

  template <int kVectors>
  void score_columns(int64_t rows, float* scores) {
    for_row_stretches(rows, [&](int64_t row, auto stretch) {
      __m512 products[stretch()][kVectors];
      for (auto& line : products)
        for (auto& product : line) product = _mm512_setzero_ps();
      add_products(&queries_[row * pairs_], pairs_, pairs_, columns_of(keys_.data(), kTileKeys), multiply, products);
      for (int i = 0; i < stretch(); ++i)
        for (int v = 0; v < kVectors; ++v)
          _mm512_storeu_ps(scores + (row + i) * kTileKeys + v * 16, products[i][v]);
    });
  }

  template <int kVectors>
  void add_columns(
      int64_t rows, const Tile<T>& tile, int64_t column, int64_t key_pairs, const float* corrections, float* sums) {
    const int64_t head_dim = 2 * pairs_;
    for_row_stretches(rows, [&](int64_t row, auto stretch) {
      __m512 products[stretch()][kVectors];
      float* target = sums + row * head_dim + column;
      for (int i = 0; i < stretch(); ++i)
        for (int v = 0; v < kVectors; ++v)
          products[i][v] =
              _mm512_mul_ps(_mm512_loadu_ps(target + i * head_dim + v * 16), _mm512_set1_ps(corrections[row + i]));
      const uint32_t* weights = &weights_[row * kTileKeys / 2];
      if (rows > kSumRows) {
        add_products(
            weights, kTileKeys / 2, key_pairs, columns_of(&values_[column], head_dim), multiply, products);
      } else {
        const auto columns = [&](int64_t pair, auto& right) {
          for (int v = 0; v < kVectors; ++v) right[v] = interleaved(tile, pair, column + v * 16);
        };
        add_products(weights, kTileKeys / 2, key_pairs, columns, multiply, products);
      }
      for (int i = 0; i < stretch(); ++i)
        for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(target + i * head_dim + v * 16, products[i][v]);
    });
  }

  int64_t pairs_ = 0;
  Buffer<uint32_t> queries_;  // [rows][pairs]
  Buffer<uint32_t> keys_;     // [pairs][64 keys]
  Buffer<uint32_t> values_;   // [pairs of keys][head_dim]
  Buffer<uint32_t> weights_;  // [rows][pairs of keys]
};

}  // namespace pagewire

#endif
