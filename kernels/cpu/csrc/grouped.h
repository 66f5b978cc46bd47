// x @ weightᵀ + bias for weights of few bits that were packed once, and x rounded to 8 bits; sums are float32.
//
// A weight is number * scale - minimum, where the number has 4 or 8 bits, and 32 or 16 neighbouring inputs of an output
// share the other two: all forms of weights in GGUF files are so. An input is number * scale, where 32 neighbours share
// a scale, as in GGUF's Q8_0. So what these inputs add is scale * scale * (sum of products of small integers) - minimum
// * (sum of the inputs), and the integers are multiplied four at a time in one instruction. It takes an unsigned and a
// signed factor, which is what both are here, so there is no bias to be taken off again.
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

// Weights of 32 neighbouring inputs and the outputs of a panel; `kInputs` of them share a scale and a minimum.
template <int kWeightBits, int kInputs>
struct WeightBlock {
  static constexpr int kBits = kWeightBits;
  static constexpr int64_t kScales = kGroup / kInputs;

  struct {
    at::Half scales[kPanel], minimums[kPanel];
  } groups[kScales];
  // Of four inputs each. With 4 bits, outputs 0 to 15 are the lower halves of bytes, and 16 to 31 the upper.
  uint8_t weights[kGroup / 4][kPanel * kBits / 8][4];
};
using Int4Block = WeightBlock<4, 32>;
using Int8Block = WeightBlock<8, 32>;
using FineInt8Block = WeightBlock<8, 16>;
static_assert(sizeof(Int4Block) % 64 == 0 && sizeof(Int8Block) % 64 == 0 && sizeof(FineInt8Block) % 64 == 0);

// Inputs in 8 bits. What is missing of the last group is 0.
struct Int8Rows {
  struct Group {
    float scale;
    float sums[3];  // of all its inputs, and of either half
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
    constexpr int64_t kVectors = kGroup / kLanes;
    Vec wide[kVectors], magnitudes(0), products(0);
    for (int64_t i = 0; i < kVectors; ++i) {
      const int64_t left = std::clamp(count - i * kLanes, int64_t{0}, kLanes);
      wide[i] = left > 0 ? widen(x + i * kLanes, left) : Vec(0);
      magnitudes = at::vec::maximum(magnitudes, wide[i].abs());
      products = products + wide[i] * Vec(0);
    }
    const float poison = sum(products);  // NaN where one of them is not finite
    const float most = poison == 0 ? largest(magnitudes) : 0.0f;
    const Vec factor(most > 0 ? 127 / most : 0.0f);
    alignas(64) int32_t whole[kGroup] = {};
    if (most > 0)
      for (int64_t i = 0; i < kVectors; ++i)
        at::vec::convert_to_int_of_same_size((wide[i] * factor).round()).store(whole + i * kLanes);
    int32_t sums[2] = {};
    for (int64_t i = 0; i < kGroup / 2; ++i) sums[0] += whole[i];
    for (int64_t i = kGroup / 2; i < kGroup; ++i) sums[1] += whole[i];
    for (int64_t i = 0; i < kGroup; ++i) numbers[i] = static_cast<int8_t>(whole[i]);
    const float scale = most / 127 + poison;
    const auto scaled = [&](int32_t sum) { return scale * static_cast<float>(sum); };
    return {scale, {scaled(sums[0] + sums[1]), scaled(sums[0]), scaled(sums[1])}};
  }
};

// Integers of 32 bits, as many as a vector has of float32, and bytes, four for each.
#if defined(__AVX512BW__)
using Ints = __m512i;
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Ints four_bytes(int32_t bytes) { return _mm512_set1_epi32(bytes); }
inline Ints load_bytes(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }
inline Ints half_of(Ints bytes, bool upper) {
  return _mm512_and_si512(upper ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
}
// Weights of 7 bits at most, of which no pair of products exceeds 16 bits.
inline Ints add_small_dots(Ints sums, Ints weights, Ints x, int16_t factor = 1) {
#if defined(__AVX512VNNI__)
  if (factor == 1) return _mm512_dpbusd_epi32(sums, weights, x);
#endif
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(weights, x), _mm512_set1_epi16(factor)));
}
inline Vec to_float(Ints sums) { return _mm512_cvtepi32_ps(sums); }
#elif defined(__AVX2__)
using Ints = __m256i;
inline Ints no_ints() { return _mm256_setzero_si256(); }
inline Ints four_bytes(int32_t bytes) { return _mm256_set1_epi32(bytes); }
inline Ints load_bytes(const uint8_t* bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)); }
inline Ints half_of(Ints bytes, bool upper) {
  return _mm256_and_si256(upper ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}
inline Ints add_small_dots(Ints sums, Ints weights, Ints x, int16_t factor = 1) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(factor)));
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
inline Ints load_bytes(const uint8_t* bytes) {
  Ints all;
  __builtin_memcpy(all.each, bytes, sizeof(all.each));
  return all;
}
inline Ints half_of(Ints bytes, bool upper) {
  uint8_t each[sizeof(bytes.each)];
  __builtin_memcpy(each, bytes.each, sizeof(each));
  for (auto& byte : each) byte = upper ? byte >> 4 : byte & 15;
  return load_bytes(each);
}
inline Ints add_small_dots(Ints sums, Ints weights, Ints x, int32_t factor = 1) {
  uint8_t own[sizeof(weights.each)];
  int8_t other[sizeof(x.each)];
  __builtin_memcpy(own, weights.each, sizeof(own));
  __builtin_memcpy(other, x.each, sizeof(other));
  for (int64_t i = 0; i < kLanes; ++i)
    for (int64_t j = 4 * i; j < 4 * i + 4; ++j) sums.each[i] += factor * own[j] * other[j];
  return sums;
}
inline Vec to_float(Ints sums) {
  float wide[kLanes];
  std::copy_n(sums.each, kLanes, wide);
  return Vec::loadu(wide);
}
#endif

template <int kBits>
inline Ints add_dots(Ints sums, Ints weights, Ints x) {
#if !defined(__AVX512VNNI__)
  if constexpr (kBits == 8)
    return add_small_dots(add_small_dots(sums, half_of(weights, false), x), half_of(weights, true), x, 16);
#endif
  return add_small_dots(sums, weights, x);
}

constexpr int64_t kPanelVectors = kPanel / kLanes;
// Sums of integers and of floats stay in registers: 32 of them with AVX-512, 16 with AVX2, where a row has 4 of each.
constexpr int kGroupedTileRows = kPanelVectors == 2 ? 6 : 1;

template <int kRows, typename Block>
inline void multiply_grouped_tile(
    const Block* weights, const Int8Rows& x, const Sizes& sizes, const at::BFloat16* bias, const Results& out,
    int64_t row, int64_t panel) {
  constexpr int64_t kFours = kGroup / 4 / Block::kScales;
  const int8_t* numbers = x.numbers.data() + row * x.groups * kGroup;
  const Int8Rows::Group* of_groups = x.of_groups.data() + row * x.groups;
  Vec sums[kRows][kPanelVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kPanelVectors; ++j) sums[i][j] = Vec(0);
  for (int64_t group = 0; group < x.groups; ++group) {
    const Block& block = weights[group];
    for (int64_t part = 0; part < Block::kScales; ++part) {
      Ints dots[kRows][kPanelVectors];
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kPanelVectors; ++j) dots[i][j] = no_ints();
      for (int64_t four = part * kFours; four < (part + 1) * kFours; ++four) {
        Ints bytes[kPanelVectors];
        for (int j = 0; j < kPanelVectors; ++j) {
          constexpr int kLoads = kPanelVectors * Block::kBits / 8;
          bytes[j] = load_bytes(block.weights[four][j % kLoads * kLanes]);
          if constexpr (Block::kBits == 4) bytes[j] = half_of(bytes[j], j >= kLoads);
        }
        for (int i = 0; i < kRows; ++i) {
          int32_t inputs;
          __builtin_memcpy(&inputs, numbers + (i * x.groups + group) * kGroup + 4 * four, sizeof(inputs));
          const Ints same = four_bytes(inputs);
          for (int j = 0; j < kPanelVectors; ++j) dots[i][j] = add_dots<Block::kBits>(dots[i][j], bytes[j], same);
        }
      }
      const auto& own = block.groups[part];
      for (int j = 0; j < kPanelVectors; ++j) {
        const Vec scale = widen(own.scales + j * kLanes), minimum = widen(own.minimums + j * kLanes);
        for (int i = 0; i < kRows; ++i) {
          const auto& of_inputs = of_groups[i * x.groups + group];
          const float sum = of_inputs.sums[Block::kScales == 1 ? 0 : 1 + part];
          sums[i][j] = at::vec::fmadd(to_float(dots[i][j]), scale * Vec(of_inputs.scale), sums[i][j]);
          sums[i][j] = at::vec::fnmadd(minimum, Vec(sum), sums[i][j]);
        }
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
template <typename Block>
void multiply_grouped(
    const Block* weights, const at::BFloat16* x, const Sizes& sizes, const at::BFloat16* bias, const Results& out) {
  const Int8Rows rounded(x, sizes);
  for_panels<kGroupedTileRows>(sizes, [&](const auto& chunk, int64_t panel) {
    for (int64_t tile = 0; tile < chunk.tiles(); ++tile)
      chunk.for_rows(tile, [&](auto rows, int64_t first) {
        multiply_grouped_tile<decltype(rows)::value>(
            weights + panel * rounded.groups, rounded, sizes, bias, out, first, panel);
      });
  });
}

}  // namespace pagewire
