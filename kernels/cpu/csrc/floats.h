// Computes x @ weightᵀ + bias for packed weights in float32 or float16. Sums are float32.
//
// Packed weights are panels of 32 outputs: [outputs / 32][inputs][32]. A tile is the product of a few rows of x and one
// panel. The sums of a tile stay in vector registers, and each tile reads its panel once. Each sum adds the inputs in
// order, in one register, so products are batch-invariant. Products by a BLAS library are not batch-invariant, because
// the library chooses tiles by the number of rows. Each stretch of 256 inputs is summed separately, and then the
// stretches' sums are added. With 4,864 inputs in float32, the largest error was a ninth of the largest error without
// stretches.
#pragma once

#include "matmul.h"

namespace pagewire {

constexpr int64_t kSummedApart = 256;
constexpr int64_t kFloatVectors = kPanel / kLanes;
// Number of rows of a tile. The tile's sums, a broadcast input and a panel's vectors must fit into vector registers.
// AVX-512 has 32 vector registers, and AVX2 has 16.
constexpr int kFloatTileRows = kFloatVectors == 2 ? 12 : kFloatVectors == 4 ? 3 : 2;

// Multiplies a tile. The results are [rows, outputs], in the type of the weights or in float32.
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

// weights is [panels, inputs, 32]. x is [rows, inputs] with rows `x_stride` elements apart. bias is [outputs] or null.
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
