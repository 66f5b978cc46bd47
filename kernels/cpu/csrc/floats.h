// x @ weightᵀ + bias for packed weights in float32 or float16. Sums are float32.
//
// Packed weights are panels of 32 outputs: [outputs / 32][inputs][32]. A tile is a few rows of x times one panel, with
// its sums in registers. Inputs are added in order, so products are batch-invariant; a BLAS library's tiles depend on
// the number of rows. Stretches of 256 inputs are summed separately: with 4,864 inputs in float32, the largest error is
// a ninth.
#pragma once

#include "matmul.h"

namespace pagewire {

constexpr int64_t kSummedApart = 256;
constexpr int64_t kFloatVectors = kPanel / kLanes;
// Rows of a tile. Its sums, a broadcast input and a panel's vectors must fit into registers: 32 with AVX-512, 16 with
// AVX2.
constexpr int kFloatTileRows = kFloatVectors == 2 ? 12 : kFloatVectors == 4 ? 3 : 2;

// Results are [rows, outputs], in the weights' type or float32.
template <int kRows, typename T, typename Out>
inline void multiply_float_tile(
    const T* weights, const float* x, const Sizes& sizes, const T* bias, Out* out, int64_t row, int64_t panel) {
  x += row * sizes.x_stride;
  Vec totals[kRows][kFloatVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kFloatVectors; ++j) totals[i][j] = Vec(0);
  for (int64_t start = 0; start < sizes.inputs; start += kSummedApart) {
    Vec sums[kRows][kFloatVectors];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kFloatVectors; ++j) sums[i][j] = Vec(0);
    for (int64_t k = start; k < std::min(sizes.inputs, start + kSummedApart); ++k) {
      Vec factors[kFloatVectors];
      for (int j = 0; j < kFloatVectors; ++j) factors[j] = widen(weights + k * kPanel + j * kLanes);
      for (int i = 0; i < kRows; ++i) {
        const Vec number(x[i * sizes.x_stride + k]);
        for (int j = 0; j < kFloatVectors; ++j) sums[i][j] = at::vec::fmadd(number, factors[j], sums[i][j]);
      }
    }
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kFloatVectors; ++j) totals[i][j] = totals[i][j] + sums[i][j];
  }
  for (int j = 0; j < kFloatVectors; ++j) {
    const int64_t output = panel * kPanel + j * kLanes, left = std::min(kLanes, sizes.outputs - output);
    if (left <= 0) break;
    const Vec added = bias == nullptr ? Vec(0) : widen(bias + output, left);
    for (int i = 0; i < kRows; ++i) store(out + (row + i) * sizes.outputs + output, totals[i][j] + added, left);
  }
}

// weights: [panels, inputs, 32]. x: [rows, inputs], rows `x_stride` elements apart. bias: [outputs] or null.
template <typename T, typename Out>
void multiply_floats(const T* weights, const float* x, const Sizes& sizes, const T* bias, Out* out) {
  for_panels<kFloatTileRows>(sizes, [&](const auto& chunk, int64_t panel) {
    for (int64_t tile = 0; tile < chunk.tiles(); ++tile)
      chunk.for_rows(tile, [&](auto rows, int64_t first) {
        multiply_float_tile<decltype(rows)::value>(
            weights + panel * kPanel * sizes.inputs, x, sizes, bias, out, first, panel);
      });
  });
}

}  // namespace pagewire
