// x @ weightᵀ + bias in bf16, for weights that were packed once.
//
// Packed weights are panels of 32 outputs: [outputs / 32][inputs / 2][32][2], so that one 64-byte vector holds 16
// outputs of two neighbouring inputs, which is what the bf16 dot product takes. A tile of at most 12 rows by one panel
// lives in 24 vector registers and streams the panel once; 12 rows are what keeps two dot products a cycle fed with
// one broadcast each. Rows are taken 192 at a time, so that they stay in a core's second cache while panels pass by.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "team.h"

namespace pagewire {

constexpr int64_t kPanel = 32;

#if defined(__AVX512BF16__)

constexpr int64_t kTileRows = 12;
constexpr int64_t kChunkRows = 192;

struct Product {
  const at::BFloat16* x;  // [rows, inputs], rows `x_stride` apart
  int64_t x_stride;
  const at::BFloat16* weight;  // packed
  const at::BFloat16* bias;    // [outputs], or null
  at::BFloat16* out;           // [rows, outputs]
  int64_t rows, inputs, outputs;
};

template <int kRows>
inline void multiply_tile(const Product& p, int64_t row, int64_t panel) {
  const at::BFloat16* x = p.x + row * p.x_stride;
  const at::BFloat16* weight = p.weight + panel * kPanel * p.inputs;
  __m512 sums[kRows][2];
  for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < p.inputs; k += 2) {
    const auto left = (__m512bh)_mm512_loadu_si512(weight + k * kPanel);
    const auto right = (__m512bh)_mm512_loadu_si512(weight + k * kPanel + 32);
    for (int i = 0; i < kRows; ++i) {
      int32_t pair;
      __builtin_memcpy(&pair, x + i * p.x_stride + k, sizeof(pair));
      const auto both = (__m512bh)_mm512_set1_epi32(pair);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], both, left);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], both, right);
    }
  }
  const int64_t column = panel * kPanel;
  for (int half = 0; half < 2; ++half) {
    const int64_t left = p.outputs - column - half * 16;
    if (left <= 0) break;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xFFFF : (1 << left) - 1);
    __m512 bias = _mm512_setzero_ps();
    if (p.bias != nullptr) {
      const __m256i narrow = _mm256_maskz_loadu_epi16(mask, p.bias + column + half * 16);
      bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
    for (int i = 0; i < kRows; ++i) {
      const auto narrow = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[i][half], bias));
      _mm256_mask_storeu_epi16(p.out + (row + i) * p.outputs + column + half * 16, mask, narrow);
    }
  }
}

template <int kRows = kTileRows>
inline void multiply_rows(const Product& p, int64_t row, int64_t rows, int64_t panel) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<kRows>(p, row, panel);
    multiply_rows<kRows - 1>(p, row, rows, panel);
  }
}

inline void multiply(const Product& p) {
  const int64_t panels = (p.outputs + kPanel - 1) / kPanel;
  const int64_t chunks = (p.rows + kChunkRows - 1) / kChunkRows;
  parallel_for(chunks * panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / panels * kChunkRows;
      const int64_t rows = std::min(kChunkRows, p.rows - first);
      // Tiles of even height: 32 rows are 11, 11 and 10.
      const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t start = rows * tile / tiles;
        multiply_rows(p, first + start, rows * (tile + 1) / tiles - start, item % panels);
      }
    }
  });
}

#endif

}  // namespace pagewire
