// x @ weightᵀ + bias for weights and x in 8 bits. Sums are float32.
//
// 64 neighbouring inputs share a scale, both of an output and of a row of x. Integers are multiplied four at a time
// (integers.h) and scaled once for 64 inputs. Five of six vector instructions multiply; in grouped.h half do, because
// groups have 32 inputs and weights are unpacked. With weights in the cache, a thread reaches 0.72 to 0.79 of a core's
// peak. Groups of 128 inputs would be 7% faster, but less exact. Batch-invariant, with the same bits for every
// instruction set.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "grouped.h"
#include "integers.h"
#include "matmul.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kLongGroup = 64;

inline int64_t long_groups_of(int64_t inputs) { return (inputs + kLongGroup - 1) / kLongGroup; }

// The weights of a panel's outputs for 64 neighbouring inputs. Numbers after the last input are not read.
struct LongBlock {
  float scales[kPanel];
  uint8_t numbers[kLongGroup / 4][kPanel][4];  // numbers plus 128; each entry has four inputs

  float weight(int64_t input, int64_t output) const {
    return static_cast<float>(numbers[input / 4][output][input % 4] - 128) * scales[output];
  }
};
static_assert(sizeof(LongBlock) % 64 == 0);

// The rows of x in 8 bits, in groups of 64 inputs. The last four inputs of a row are padded with 0.
struct LongInt8Rows {
  struct Group {
    float scale;
    int32_t correction;  // for the 128 added to weights
  };
  int64_t groups;  // groups of a row
  Buffer<int8_t> numbers;
  Buffer<Group> of_groups;

  // If a number of a group is not finite, neither is its scale.
  LongInt8Rows(const at::BFloat16* x, const Sizes& sizes)
      : groups(long_groups_of(sizes.inputs)), numbers(sizes.rows * groups * kLongGroup), of_groups(sizes.rows * groups) {
    parallel_for(sizes.rows, rows_a_thread(sizes.inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t place = row * groups + group, first = group * kLongGroup, left = sizes.inputs - first;
          const at::BFloat16* from = x + row * sizes.x_stride + first;
          int8_t* to = numbers.data() + place * kLongGroup;
          const float scale =
              left >= kLongGroup ? round_to_8_bits(from, kLongGroup, to) : round_to_8_bits(from, left, to);
          of_groups[place] = {scale, (kTakenOff<8> - 128) * sum_of(to)};
        }
    });
  }

 private:
  static int32_t sum_of(const int8_t* numbers) {
    Ints sums = same_in_all(0);
    for (int64_t i = 0; i < kLongGroup; i += 4 * kLanes)
      sums = add_dots<1>(sums, same_in_all(0x01010101), load_bytes(numbers + i));
    return static_cast<int32_t>(sum(to_float(sums)));
  }
};

// Rows of a tile whose integer sums stay in registers: with AVX-512, 6 rows take 12 of 32. GCC 12 holds float sums in
// memory, updated once for 64 inputs.
constexpr int kLongTileRows = kPanelVectors == 2 ? 6 : 2;

template <int kRows>
inline void multiply_long_tile(
    const LongBlock* weights, Ahead ahead, const LongInt8Rows& x, const Sizes& sizes, const at::BFloat16* bias,
    const Results& out, int64_t row, int64_t panel) {
  const int8_t* numbers = x.numbers.data() + row * x.groups * kLongGroup;
  const LongInt8Rows::Group* of_groups = x.of_groups.data() + row * x.groups;
  for (int i = 0; i < kRows; ++i) out.fetch((row + i) * sizes.outputs + panel * kPanel);
  Vec sums[kRows][kPanelVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kPanelVectors; ++j) sums[i][j] = Vec(0);
  for (int64_t group = 0; group < x.groups; ++group) {
    const LongBlock& block = weights[group];
    const int64_t fours = (std::min(kLongGroup, sizes.inputs - group * kLongGroup) + 3) / 4;
    Ints dots[kRows][kPanelVectors];
    for (int i = 0; i < kRows; ++i)
      for (auto& dot : dots[i]) dot = same_in_all(of_groups[i * x.groups + group].correction);
    ahead.fetch();
    for (int64_t four = 0; four < fours; ++four) {
      Ints bytes[kPanelVectors];
      for (int j = 0; j < kPanelVectors; ++j) bytes[j] = load_bytes(block.numbers[four][j * kLanes]);
      for (int i = 0; i < kRows; ++i) {
        int32_t inputs;
        __builtin_memcpy(&inputs, numbers + (i * x.groups + group) * kLongGroup + 4 * four, sizeof(inputs));
        const Ints same = same_in_all(inputs);
        for (int j = 0; j < kPanelVectors; ++j) dots[i][j] = add_dots<8>(dots[i][j], bytes[j], same);
      }
    }
    for (int j = 0; j < kPanelVectors; ++j) {
      const Vec scale = Vec::loadu(block.scales + j * kLanes);
      for (int i = 0; i < kRows; ++i)
        sums[i][j] =
            at::vec::fmadd(to_float(dots[i][j]), scale * Vec(of_groups[i * x.groups + group].scale), sums[i][j]);
    }
  }
  put_tile<kRows>(sums, sizes, bias, out, row, panel);
}

// weights: [panels, groups]. x: [rows, inputs], rows `x_stride` elements apart. bias: [outputs] or null.
inline void multiply_long(
    const LongBlock* weights, const at::BFloat16* x, const Sizes& sizes, const at::BFloat16* bias, const Results& out) {
  const LongInt8Rows rounded(x, sizes);
  for_panels<kLongTileRows>(sizes, [&](const auto& chunk, int64_t panel) {
    const LongBlock* own = weights + panel * rounded.groups;
    for (int64_t tile = 0; tile < chunk.tiles(); ++tile) {
      const Ahead ahead(own + rounded.groups, rounded.groups, tile, chunk.tiles(), rounded.groups);
      chunk.for_rows(tile, [&](auto rows, int64_t first) {
        multiply_long_tile<decltype(rows)::value>(own, ahead, rounded, sizes, bias, out, first, panel);
      });
    }
  });
}

}  // namespace pagewire
