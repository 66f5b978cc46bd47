// x @ weightᵀ + bias for weights of 4 bits that were packed once, and x rounded to 8 bits; sums are float32.
//
// A weight is number * scale - minimum, where the number is 0 to 15, and 32 neighbouring inputs of an output share the
// other two: the form of GGUF's Q4_1. An input is number * scale, where 32 neighbours share a scale, as in GGUF's Q8_0.
// So what 32 inputs add is scale * scale * (sum of products of small integers) - minimum * (sum of the inputs), and the
// integers are multiplied four at a time in one instruction. It takes an unsigned and a signed factor, which is what
// both are here, so there is no bias to be taken off again.
//
// Sums of integers are exact, and those of groups are made in the order of the inputs, in float32, whatever the number
// of rows and the instruction set: a row's results are the same to the bit alone, among others, and on other machines.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "matmul.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

// int4 weights of 32 neighbouring inputs and the outputs of a panel.
struct Int4Group {
  at::Half scales[kPanel], minimums[kPanel];
  // Of four inputs each, outputs 0 to 15 in the lower halves of bytes, and 16 to 31 in the upper.
  uint8_t weights[kGroup / 4][kPanel / 2][4];
};
static_assert(sizeof(Int4Group) % 64 == 0);

// Inputs in 8 bits. What is missing of the last group is 0.
struct Int8Rows {
  struct Group {
    float scale, sum;
  };
  int64_t groups;  // of a row
  Buffer<int8_t> numbers;
  Buffer<Group> of_groups;

  // A row with a number that is not finite has scales and sums that are not, and any numbers.
  Int8Rows(const at::BFloat16* x, const Sizes& sizes)
      : groups(groups_of(sizes.inputs)), numbers(sizes.rows * groups * kGroup), of_groups(sizes.rows * groups) {
    parallel_for(sizes.rows, rows_a_thread(sizes.inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t place = row * groups + group, first = group * kGroup;
          of_groups[place] = round_group(
              x + row * sizes.x_stride + first, std::min(kGroup, sizes.inputs - first), numbers.data() + place * kGroup);
        }
    });
  }

 private:
  static Group round_group(const at::BFloat16* x, int64_t count, int8_t* numbers) {
    alignas(64) float wide[kGroup] = {};
    float most = 0, poison = 0;
    for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>(x[i]);
    for (int64_t i = 0; i < kGroup; ++i) {
      most = std::max(most, std::abs(wide[i]));
      poison += wide[i] * 0.0f;  // NaN where it is not finite
    }
    if (poison != 0) most = 0;
    const float factor = most > 0 ? 127 / most : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      const auto number = static_cast<int32_t>(std::nearbyint(poison == 0 ? wide[i] * factor : 0.0f));
      numbers[i] = static_cast<int8_t>(number);
      sum += number;
    }
    const float scale = most / 127 + poison;
    return {scale, scale * static_cast<float>(sum)};
  }
};

// Integers of 32 bits, as many as a vector has of float32, and bytes, four for each.
#if defined(__AVX512BW__)
using Ints = __m512i;
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Ints four_bytes(int32_t bytes) { return _mm512_set1_epi32(bytes); }
inline Ints halves(const uint8_t* bytes, bool upper) {
  const Ints loaded = _mm512_loadu_si512(bytes);
  return _mm512_and_si512(upper ? _mm512_srli_epi16(loaded, 4) : loaded, _mm512_set1_epi8(15));
}
inline Ints add_dots(Ints sums, Ints weights, Ints x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, weights, x);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(weights, x), _mm512_set1_epi16(1)));
#endif
}
inline Vec to_float(Ints sums) { return _mm512_cvtepi32_ps(sums); }
#elif defined(__AVX2__)
using Ints = __m256i;
inline Ints no_ints() { return _mm256_setzero_si256(); }
inline Ints four_bytes(int32_t bytes) { return _mm256_set1_epi32(bytes); }
inline Ints halves(const uint8_t* bytes, bool upper) {
  const Ints loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  return _mm256_and_si256(upper ? _mm256_srli_epi16(loaded, 4) : loaded, _mm256_set1_epi8(15));
}
inline Ints add_dots(Ints sums, Ints weights, Ints x) {  // no pair exceeds 2 * 15 * 127
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1)));
}
inline Vec to_float(Ints sums) { return _mm256_cvtepi32_ps(sums); }
#else
struct Ints {
  int32_t each[kLanes];
};
inline Ints no_ints() { return {}; }
inline Ints four_bytes(int32_t bytes) {
  Ints all;
  std::fill_n(all.each, kLanes, bytes);
  return all;
}
inline Ints halves(const uint8_t* bytes, bool upper) {
  Ints all;
  uint8_t found[sizeof(all.each)];
  for (size_t i = 0; i < sizeof(found); ++i) found[i] = upper ? bytes[i] >> 4 : bytes[i] & 15;
  __builtin_memcpy(all.each, found, sizeof(found));
  return all;
}
inline Ints add_dots(Ints sums, Ints weights, Ints x) {
  uint8_t own[sizeof(weights.each)];
  int8_t other[sizeof(x.each)];
  __builtin_memcpy(own, weights.each, sizeof(own));
  __builtin_memcpy(other, x.each, sizeof(other));
  for (int64_t i = 0; i < kLanes; ++i)
    for (int64_t j = 4 * i; j < 4 * i + 4; ++j) sums.each[i] += own[j] * other[j];
  return sums;
}
inline Vec to_float(Ints sums) {
  float wide[kLanes];
  std::copy_n(sums.each, kLanes, wide);
  return Vec::loadu(wide);
}
#endif

constexpr int64_t kPanelVectors = kPanel / kLanes;
// Sums of integers and of floats stay in registers: 32 of them with AVX-512, 16 with AVX2, where a row has 4 of each.
constexpr int kInt4TileRows = kPanelVectors == 2 ? 6 : 1;

template <int kRows>
inline void multiply_int4_tile(
    const Int4Group* weights, const Int8Rows& x, const Sizes& sizes, const at::BFloat16* bias, const Results& out,
    int64_t row, int64_t panel) {
  const int8_t* numbers = x.numbers.data() + row * x.groups * kGroup;
  const Int8Rows::Group* of_groups = x.of_groups.data() + row * x.groups;
  Vec sums[kRows][kPanelVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kPanelVectors; ++j) sums[i][j] = Vec(0);
  for (int64_t group = 0; group < x.groups; ++group) {
    const Int4Group& own = weights[group];
    Ints dots[kRows][kPanelVectors];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kPanelVectors; ++j) dots[i][j] = no_ints();
    for (int64_t four = 0; four < kGroup / 4; ++four) {
      Ints bytes[kPanelVectors];
      for (int j = 0; j < kPanelVectors / 2; ++j)
        for (int upper = 0; upper < 2; ++upper)
          bytes[j + upper * kPanelVectors / 2] = halves(own.weights[four][j * kLanes], upper);
      for (int i = 0; i < kRows; ++i) {
        int32_t inputs;
        __builtin_memcpy(&inputs, numbers + (i * x.groups + group) * kGroup + 4 * four, sizeof(inputs));
        const Ints same = four_bytes(inputs);
        for (int j = 0; j < kPanelVectors; ++j) dots[i][j] = add_dots(dots[i][j], bytes[j], same);
      }
    }
    for (int j = 0; j < kPanelVectors; ++j) {
      const Vec scale = widen(own.scales + j * kLanes), minimum = widen(own.minimums + j * kLanes);
      for (int i = 0; i < kRows; ++i) {
        const auto& of_inputs = of_groups[i * x.groups + group];
        sums[i][j] = at::vec::fmadd(to_float(dots[i][j]), scale * Vec(of_inputs.scale), sums[i][j]);
        sums[i][j] = at::vec::fnmadd(minimum, Vec(of_inputs.sum), sums[i][j]);
      }
    }
  }
  for (int j = 0; j < kPanelVectors; ++j) {
    const int64_t output = panel * kPanel + j * kLanes, left = std::min(kLanes, sizes.outputs - output);
    if (left <= 0) break;
    const Vec added = bias == nullptr ? Vec(0) : widen(bias + output, left);
    for (int i = 0; i < kRows; ++i) out.put((row + i) * sizes.outputs + output, sums[i][j] + added, left);
  }
}

// weights: [panels, groups]; x: [rows, inputs], rows `x_stride` apart; bias: [outputs] or null.
inline void multiply_int4(
    const Int4Group* weights, const at::BFloat16* x, const Sizes& sizes, const at::BFloat16* bias, const Results& out) {
  const Int8Rows rounded(x, sizes);
  for_panels<kInt4TileRows>(sizes, [&](const auto& chunk, int64_t panel) {
    for (int64_t tile = 0; tile < chunk.tiles(); ++tile)
      chunk.for_rows(tile, [&](auto rows, int64_t first) {
        multiply_int4_tile<decltype(rows)::value>(
            weights + panel * rounded.groups, rounded, sizes, bias, out, first, panel);
      });
  });
}

}  // namespace pagewire
