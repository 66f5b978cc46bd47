// Tile engine for an int8 KV cache, with the byte dot product of AVX-512.
#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#include <algorithm>
#include <cstring>
#include <limits>

#include "attention_tiles_bf16.h"
#include "attention_words.h"

namespace pagewire {

// Multiplies int8 keys and values unconverted, in exact sums. Queries have 16 bits and a scale for each row. Softmax
// weights times their values' scales have 16 bits and a scale for each row and tile: with one scale for all tiles, a
// large weight of a small value would round smaller weights to 0. Upper and lower bytes are multiplied as two rows: as
// many multiplications as in `Bf16Tiles`, no conversion, and half the bytes to transpose. head_dim must be a multiple
// of 64.
class Int8Tiles {
 public:
  using T = at::BFloat16;
  static constexpr bool kMultipliesNarrow = true;

  // Above a head_dim of 512, a sum of products could overflow 32 bits.
  static bool can(const Attention<T>& a) {
    return a.cache.narrow != nullptr && a.head_dim % 64 == 0 && a.head_dim <= 512;
  }

  void start(const Attention<T>& a, int64_t rows) {
    head_dim_ = a.head_dim;
    words_ = head_dim_ / 4;
    queries_.resize(2 * rows * words_);
    query_steps_.resize(rows);
    query_sums_.resize(rows);
    keys_.resize(words_ * kTileKeys);
    values_.resize(kTileKeys / 4 * head_dim_);
    products_.resize(rows * kTileKeys);
    weights_.resize(2 * rows * kTileKeys / 4);
    weight_steps_.resize(rows);
  }

  // If a query is not finite, its scale (`query_steps_`) is NaN, and its numbers are arbitrary.
  void load_query(int64_t row, const T* query) {
    Vec magnitudes(0);
    for (int64_t i = 0; i < head_dim_; i += 16) magnitudes = at::vec::maximum(magnitudes, widen(query + i).abs());
    const float most = largest(magnitudes);
    const bool is_finite = most <= std::numeric_limits<float>::max();
    const Vec factor(is_finite && most > kLeast ? kMostOfQuery / most : 0.0f);
    __m512i sums = _mm512_setzero_si512();
    auto* high = reinterpret_cast<int8_t*>(&queries_[2 * row * words_]);
    for (int64_t i = 0; i < head_dim_; i += 16) {
      const __m512i whole = _mm512_cvtps_epi32(widen(query + i) * factor);
      sums = _mm512_add_epi32(sums, whole);
      // Adding 128 rounds the upper byte, because the lower byte is signed.
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + head_dim_ + i), _mm512_cvtepi32_epi8(whole));
    }
    query_sums_[row] = _mm512_reduce_add_epi32(sums);
    query_steps_[row] = is_finite ? most / kMostOfQuery : std::numeric_limits<float>::quiet_NaN();
  }

  void score(int64_t rows, const Tile<T>& tile, float* scores) {
    for (int64_t group = 0; group < tile.count; group += 16) {
      for (int64_t word = 0; word < words_; word += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i)  // to unsigned bytes
          r[i] = _mm512_xor_si512(
              _mm512_loadu_si512(tile.narrow_keys[group + i] + 4 * word), _mm512_set1_epi8(-128));
        transpose_words(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(&keys_[(word + i) * kTileKeys + group], r[i]);
      }
    }
    for (int64_t key = 0; key < kTileKeys; ++key) {
      std::memcpy(&key_scales_[key], tile.narrow_keys[key] + head_dim_, sizeof(float));
      std::memcpy(&value_scales_[key], tile.narrow_values[key] + head_dim_, sizeof(float));
    }
    for_columns(tile.count, [&](auto vectors) { score_columns<vectors()>(rows, scores); });
  }

  static constexpr float kLogBase = Bf16Tiles::kLogBase;
  static Vec power(const Vec& x) { return Bf16Tiles::power(x); }

  void keep_weights(int64_t row, int64_t i, const Vec& weights) {
    (weights * Vec::loadu(&value_scales_[i])).store(&products_[row * kTileKeys + i]);
  }

  void add_values(int64_t rows, const Tile<T>& tile, const float* corrections, float* sums) {
    const int64_t quads = (tile.count + 3) / 4;
    for (int64_t row = 0; row < rows; ++row) round_weights(row);
    for (int64_t column = 0; column < head_dim_; column += 64) {
      const auto columns = [&](int64_t quad, auto& right) { interleave(tile, quad, column, right); };
      if (2 * rows <= kSumRows) {
        add_columns(rows, quads, columns, corrections, sums + column);
        continue;
      }
      for (int64_t quad = 0; quad < quads; ++quad) {
        __m512i r[4];
        columns(quad, r);
        for (int v = 0; v < 4; ++v) _mm512_storeu_si512(&values_[quad * 64 + v * 16], r[v]);
      }
      add_columns(rows, quads, columns_of(values_.data(), 64), corrections, sums + column);
    }
  }

 private:
  // GCC keeps sums in registers only in the type of its dot product builtin, which is not __m512i.
  using Sums = int32_t __attribute__((vector_size(64)));

  static constexpr float kMostOfQuery = 127 * 256 + 127, kMostOfWeight = 65535;
  static constexpr float kLeast = 1e-33f;  // a smaller divisor would give infinity

  // Quantises a row's weights to unsigned 16 bits. Non-negative floats sort like their bits, NaN above all, so the
  // largest is found by comparing integers.
  void round_weights(int64_t row) {
    const float* products = &products_[row * kTileKeys];
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) most = _mm512_max_epu32(most, _mm512_loadu_si512(products + i * 16));
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    const __m512 factor = _mm512_set1_ps(largest < kLeast ? 0.0f : kMostOfWeight / largest);
    weight_steps_[row] = largest < kLeast ? 0.0f : largest / kMostOfWeight;
    __m512i whole[4];
    for (int i = 0; i < 4; ++i)
      whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(products + i * 16), factor));
    const __m512i first = _mm512_packus_epi32(whole[0], whole[1]), second = _mm512_packus_epi32(whole[2], whole[3]);
    const __m512i low = _mm512_set1_epi16(255);
    const __m512i halves[] = {
        _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8)),
        _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low))};
    for (int i = 0; i < 2; ++i)
      _mm512_storeu_si512(&weights_[(2 * row + i) * 16], exchanged(halves[i]));
  }

  // Moves word i of 128-bit lane j to word j of lane i, because pack and unpack work lane by lane.
  [[gnu::always_inline]] static __m512i exchanged(__m512i words) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, words);
  }

  // Interleaves the values of four neighbouring keys in 64 columns: a 32-bit word of four bytes for each column.
  [[gnu::always_inline]] static void interleave(
      const Tile<T>& tile, int64_t quad, int64_t column, __m512i (&words)[4]) {
    __m512i r[4];
    for (int i = 0; i < 4; ++i) r[i] = exchanged(_mm512_loadu_si512(tile.narrow_values[4 * quad + i] + column));
    const __m512i low = _mm512_unpacklo_epi8(r[0], r[1]), high = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i low2 = _mm512_unpacklo_epi8(r[2], r[3]), high2 = _mm512_unpackhi_epi8(r[2], r[3]);
    words[0] = _mm512_unpacklo_epi16(low, low2);
    words[1] = _mm512_unpackhi_epi16(low, low2);
    words[2] = _mm512_unpacklo_epi16(high, high2);
    words[3] = _mm512_unpackhi_epi16(high, high2);
  }

  // Combines a row's sums over upper and lower bytes.
  static __m512 joined(Sums upper, Sums lower) { return _mm512_cvtepi32_ps((__m512i)((upper << 8) + lower)); }

  template <int kVectors>
  void score_columns(int64_t rows, float* scores) {
    const auto multiply = [](Sums sum, __m512i query, __m512i keys) {
      return (Sums)_mm512_dpbusd_epi32((__m512i)sum, keys, query);
    };
    for_row_stretches(2 * rows, [&](int64_t half, auto stretch) {
      const int64_t first = half / 2;
      Sums products[stretch()][kVectors];
      for (int i = 0; i < stretch(); ++i)
        for (auto& product : products[i])
          product = i % 2 == 0 ? Sums{} : (Sums)_mm512_set1_epi32(-128 * query_sums_[first + i / 2]);
      add_products(&queries_[half * words_], words_, words_, columns_of(keys_.data(), kTileKeys), multiply, products);
      for (int i = 0; i < stretch() / 2; ++i) {
        const __m512 step = _mm512_set1_ps(query_steps_[first + i]);
        for (int v = 0; v < kVectors; ++v)
          _mm512_storeu_ps(
              scores + (first + i) * kTileKeys + v * 16,
              _mm512_mul_ps(
                  joined(products[2 * i][v], products[2 * i + 1][v]),
                  _mm512_mul_ps(_mm512_loadu_ps(key_scales_ + v * 16), step)));
      }
    });
  }

  template <typename Columns>
  void add_columns(int64_t rows, int64_t quads, const Columns& columns, const float* corrections, float* sums) {
    const auto multiply = [](Sums sum, __m512i weights, __m512i values) {
      return (Sums)_mm512_dpbusd_epi32((__m512i)sum, weights, values);
    };
    for_row_stretches(2 * rows, [&](int64_t half, auto stretch) {
      Sums products[stretch()][4];
      for (auto& line : products)
        for (auto& product : line) product = Sums{};
      add_products(&weights_[half * 16], 16, quads, columns, multiply, products);
      for (int i = 0; i < stretch() / 2; ++i) {
        const int64_t row = half / 2 + i;
        const __m512 step = _mm512_set1_ps(weight_steps_[row]), correction = _mm512_set1_ps(corrections[row]);
        for (int v = 0; v < 4; ++v) {
          float* target = sums + row * head_dim_ + v * 16;
          const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(target), correction);
          _mm512_storeu_ps(target, _mm512_fmadd_ps(joined(products[2 * i][v], products[2 * i + 1][v]), step, before));
        }
      }
    });
  }

  int64_t head_dim_ = 0, words_ = 0;
  Buffer<uint32_t> queries_;  // [rows][upper and lower bytes][words]
  Buffer<float> query_steps_;
  Buffer<int32_t> query_sums_;
  Buffer<uint32_t> keys_;    // [words][64 keys]
  Buffer<uint32_t> values_;  // [words of four keys][64 columns]
  alignas(64) float key_scales_[kTileKeys], value_scales_[kTileKeys];
  Buffer<float> products_;    // [rows][keys]: weights times the scales of values
  Buffer<uint32_t> weights_;  // [rows][upper and lower bytes][words of four keys]
  Buffer<float> weight_steps_;
};

}  // namespace pagewire

#endif
