// x @ weightᵀ + bias for bf16 x, and weights in bf16 or int8 that were packed once; sums are float32, and are rounded to
// bf16 or not, as asked.
//
// Packed weights are panels of 32 outputs: [outputs / 32][inputs / 2][32][2], so that one vector holds 16 outputs of
// two neighbouring inputs, which is what dot products of pairs take. A tile of at most 12 rows by one panel lives in 24
// vector registers and streams the panel once; 12 rows are what keeps two dot products a cycle fed with one broadcast
// each. Rows are taken 192 at a time, so that they stay in a core's second cache while panels pass by.
//
// int8 weights have a scale for each output. With few rows, where what counts is that half as much memory is read, they
// are widened to int16 as they are read and multiplied by x rounded to 12 bits with a scale for each row; these sums
// are exact in int32 for up to 8,192 inputs. With more rows or inputs a panel is widened to bf16, which holds int8
// exactly, before its tiles are multiplied: the dot product of bf16 is twice as fast as that of int16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>

#include "team.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kPanel = 32;
constexpr int64_t kMaxInt8Inputs = 8192;

#if defined(__AVX512BF16__)

constexpr int64_t kTileRows = 12;
constexpr int64_t kChunkRows = 192;

struct Sizes {
  int64_t rows, inputs, outputs, x_stride;
};

struct Bf16Product {
  using Number = at::BFloat16;
  using Weight = at::BFloat16;
  using Sums = __m512;

  const Number* x;       // [rows, inputs], rows `x_stride` apart
  const Weight* weight;  // packed

  const Weight* panel(const Sizes& sizes, int64_t panel) const { return weight + panel * kPanel * sizes.inputs; }
  static Sums zero() { return _mm512_setzero_ps(); }
  static __m512i read(const Weight* pairs) { return _mm512_loadu_si512(pairs); }
  static Sums add(Sums sums, __m512i x, __m512i weight) {
    return _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)weight);
  }
  __m512 finish(Sums sums, int64_t, int64_t, __mmask16) const { return sums; }
};

struct Int8Product {
  using Number = int16_t;
  using Weight = int8_t;
  using Sums = __m512i;

  const Number* x;
  const Weight* weight;
  const float *x_scales, *weight_scales;  // [rows], [outputs]

  const Weight* panel(const Sizes& sizes, int64_t panel) const { return weight + panel * kPanel * sizes.inputs; }
  static Sums zero() { return _mm512_setzero_si512(); }
  static __m512i read(const Weight* pairs) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
  }
  static Sums add(Sums sums, __m512i x, __m512i weight) { return _mm512_dpwssd_epi32(sums, x, weight); }
  __m512 finish(Sums sums, int64_t row, int64_t output, __mmask16 mask) const {
    const __m512 scales = _mm512_maskz_loadu_ps(mask, weight_scales + output);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(scales, _mm512_set1_ps(x_scales[row])));
  }
};

struct WidenedProduct : Bf16Product {
  const int8_t* weight8;  // packed
  const float* weight_scales;

  const Weight* panel(const Sizes& sizes, int64_t panel) const {
    static thread_local Buffer<at::BFloat16> widened;
    const int64_t count = kPanel * sizes.inputs;
    widened.resize(count);
    const auto* source = reinterpret_cast<const __m128i*>(weight8 + panel * count);
    for (int64_t i = 0; i < count; i += 32, source += 2) {
      const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source)));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source + 1)));
      _mm512_storeu_si512(widened.data() + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    return widened.data();
  }
  __m512 finish(Sums sums, int64_t, int64_t output, __mmask16 mask) const {
    return _mm512_mul_ps(sums, _mm512_maskz_loadu_ps(mask, weight_scales + output));
  }
};

// Where results go, [rows, outputs]: one of the two.
struct Results {
  at::BFloat16* rounded;
  float* wide;

  void store(int64_t place, __mmask16 mask, __m512 sums) const {
    if (wide != nullptr) {
      _mm512_mask_storeu_ps(wide + place, mask, sums);
    } else {
      _mm256_mask_storeu_epi16(rounded + place, mask, (__m256i)_mm512_cvtneps_pbh(sums));
    }
  }
};

template <int kRows, typename Product>
inline void multiply_tile(
    const Product& p, const typename Product::Weight* weight, const Sizes& sizes, const at::BFloat16* bias,
    const Results& out, int64_t row, int64_t panel) {
  const auto* x = p.x + row * sizes.x_stride;
  typename Product::Sums sums[kRows][2];
  for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = Product::zero();
  for (int64_t k = 0; k < sizes.inputs; k += 2) {
    const __m512i left = Product::read(weight + k * kPanel), right = Product::read(weight + k * kPanel + 32);
    for (int i = 0; i < kRows; ++i) {
      int32_t pair;
      __builtin_memcpy(&pair, x + i * sizes.x_stride + k, sizeof(pair));
      const __m512i both = _mm512_set1_epi32(pair);
      sums[i][0] = Product::add(sums[i][0], both, left);
      sums[i][1] = Product::add(sums[i][1], both, right);
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t output = panel * kPanel + half * 16, left = sizes.outputs - output;
    if (left <= 0) break;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xFFFF : (1 << left) - 1);
    __m512 added = _mm512_setzero_ps();
    if (bias != nullptr) {
      const __m256i narrow = _mm256_maskz_loadu_epi16(mask, bias + output);
      added = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
    for (int i = 0; i < kRows; ++i) {
      const __m512 product = _mm512_add_ps(p.finish(sums[i][half], row + i, output, mask), added);
      out.store((row + i) * sizes.outputs + output, mask, product);
    }
  }
}

template <typename Product, int kRows = kTileRows>
inline void multiply_rows(
    const Product& p, const typename Product::Weight* weight, const Sizes& sizes, const at::BFloat16* bias,
    const Results& out, int64_t row, int64_t rows, int64_t panel) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<kRows>(p, weight, sizes, bias, out, row, panel);
    multiply_rows<Product, kRows - 1>(p, weight, sizes, bias, out, row, rows, panel);
  }
}

// bias: [outputs] or null.
template <typename Product>
void multiply(const Product& p, const Sizes& sizes, const at::BFloat16* bias, const Results& out) {
  const int64_t panels = (sizes.outputs + kPanel - 1) / kPanel;
  const int64_t chunks = (sizes.rows + kChunkRows - 1) / kChunkRows;
  parallel_for(chunks * panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / panels * kChunkRows;
      const int64_t rows = std::min(kChunkRows, sizes.rows - first);
      const auto* weight = p.panel(sizes, item % panels);
      // Tiles of even height: 32 rows are 11, 11 and 10.
      const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t start = rows * tile / tiles;
        multiply_rows(p, weight, sizes, bias, out, first + start, rows * (tile + 1) / tiles - start, item % panels);
      }
    }
  });
}

// Rows as integers within ±2,047 and the scales that make them numbers again; a row that is not finite has no finite
// scale.
inline void round_to_12_bits(const at::BFloat16* x, const Sizes& sizes, int16_t* rounded, float* scales) {
  parallel_for(sizes.rows, rows_a_thread(sizes.inputs), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const at::BFloat16* source = x + row * sizes.x_stride;
      Vec most(0.0f);
      for_each_vector(sizes.inputs, [&](int64_t i, int64_t n) {
        most = at::vec::maximum(most, widen(source + i, n).abs());
      });
      scales[row] = largest(most) / 2047.0f;
      const Vec factor(scales[row] > 0.0f ? 1.0f / scales[row] : 0.0f);
      for_each_vector(sizes.inputs, [&](int64_t i, int64_t n) {
        const __m512i wide = _mm512_cvtps_epi32(widen(source + i, n) * factor);
        _mm256_mask_storeu_epi16(
            rounded + row * sizes.inputs + i, static_cast<__mmask16>((1 << n) - 1), _mm512_cvtepi32_epi16(wide));
      });
    }
  });
}

#endif

}  // namespace pagewire
