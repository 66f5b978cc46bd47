// Dot products of 32-bit words (two bf16 or four bytes), 16 at a time, for `Bf16Tiles` and `Int8Tiles`.
#pragma once

#if defined(__AVX512BF16__)

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace pagewire {

// Transposes 16 vectors of 16 words.
[[gnu::always_inline]] inline void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// Adds dot products of words. sums: [rows, kVectors * 16]. left: rows of `words` words, `left_stride` words apart.
// columns(word, right): loads a word of all columns. multiply(sum, left, right): adds the products of two words.
template <int kVectors, int kRows, typename Sum, typename Columns, typename Multiply>
[[gnu::always_inline]] inline void add_products(
    const uint32_t* left, int64_t left_stride, int64_t words, const Columns& columns, const Multiply& multiply,
    Sum (&sums)[kRows][kVectors]) {
  for (int64_t word = 0; word < words; ++word) {
    __m512i right[kVectors];
    columns(word, right);
    for (int row = 0; row < kRows; ++row) {
      const __m512i same = _mm512_set1_epi32(static_cast<int>(left[row * left_stride + word]));
      for (int v = 0; v < kVectors; ++v) sums[row][v] = multiply(sums[row][v], same, right[v]);
    }
  }
}

// The argument `columns` of `add_products` for rows in memory, `stride` words apart.
inline auto columns_of(const uint32_t* words, int64_t stride) {
  return [=](int64_t word, auto& right) {
    for (auto& vector : right) vector = _mm512_loadu_si512(words + word * stride + (&vector - right) * 16);
  };
}

// Rows whose sums stay in registers: 6 rows of 64 sums with AVX-512. Even, because `Int8Tiles` has two rows a query
// row.
constexpr int64_t kSumRows = 6;

// Splits `rows` into stretches of at most kSumRows, and calls apply(first_row, integral_constant<rows>).
template <typename F>
inline void for_row_stretches(int64_t rows, const F& apply) {
  for (int64_t row = 0; row < rows; row += kSumRows) {
    switch (std::min(kSumRows, rows - row)) {
      case 1: apply(row, std::integral_constant<int, 1>()); break;
      case 2: apply(row, std::integral_constant<int, 2>()); break;
      case 3: apply(row, std::integral_constant<int, 3>()); break;
      case 4: apply(row, std::integral_constant<int, 4>()); break;
      case 5: apply(row, std::integral_constant<int, 5>()); break;
      default: apply(row, std::integral_constant<int, 6>());
    }
  }
}

// Calls apply(integral_constant<16-column vectors of `keys` keys>).
template <typename F>
inline void for_columns(int64_t keys, const F& apply) {
  if (keys > 32) return apply(std::integral_constant<int, 4>());
  if (keys > 16) return apply(std::integral_constant<int, 2>());
  apply(std::integral_constant<int, 1>());
}

}  // namespace pagewire

#endif
