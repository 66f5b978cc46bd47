// x @ weightᵀ + bias for packed weights of 4, 5, 6 or 8 bits, with x quantised to 8 bits. Sums are float32.
//
// A weight is number * scale - minimum, with scale and minimum for 32 or 16 neighbouring inputs of an output. All
// supported block types of GGUF have this form; in K types, scales and minimums are 8-bit multiples of a unit for 256
// inputs. x is number * scale for 32 inputs, as in Q8_0. A group adds weight_scale * x_scale * (sum of products of
// integers) - minimum * (sum of the inputs), four products at a time (integers.h). Symmetric weights have no minimum:
// their middle number (8 for 4 bits) means zero, and its product with the sum of x's integers is subtracted before
// scaling.
//
// Integer sums are exact, and groups are added in float32 in the order of the inputs. Products are therefore
// batch-invariant, and have the same bits with every instruction set.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <utility>

#include "integers.h"
#include "matmul.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

// A panel's 32 outputs for one group of 32 inputs with float16 scales, or for eight groups with integer scales and
// shared units. `kInputs` inputs share a scale and, unless weights are symmetric, a minimum.
//
// No bit is unused: the lower four bits of 5-bit and 6-bit numbers are stored like 4-bit numbers, and a 32-bit word has
// the high bits of an output's numbers with one scale. After every four inputs, the word is rotated right by a number's
// high bits, so that each byte has the next number's high bits in place.
template <int kWeightBits, int kInputs, bool kIsSymmetric, typename Factor = at::Half>
struct WeightBlock {
  static constexpr int kBits = kWeightBits, kLowBits = kBits == 8 ? 8 : 4, kHighBits = kBits - kLowBits;
  static constexpr int64_t kShared = kInputs, kScales = kGroup / kInputs;
  static constexpr bool kSymmetric = kIsSymmetric;
  static constexpr bool kHasUnits = !std::is_same_v<Factor, at::Half>;
  static constexpr int64_t kGroups = kHasUnits ? 8 : 1, kUnits = kSymmetric ? 1 : 2;
  static constexpr int32_t kZero = kSymmetric ? 1 << (kBits - 1) : 0;
  static_assert(kHighBits == 0 || kHighBits * kInputs == 32);

  struct Group {
    Factor scales[kScales][kPanel];
    Factor minimums[kSymmetric ? 0 : kScales][kPanel];
    uint32_t high[kHighBits == 0 ? 0 : kScales][kPanel];
    // Numbers of four inputs each. With 4 bits, outputs 0 to 15 are lower halves of bytes, outputs 16 to 31 upper
    // halves.
    uint8_t low[kGroup / 4][kPanel * kLowBits / 8][4];
  };
  at::Half units[kHasUnits ? kUnits : 0][kPanel];
  Group groups[kGroups];

  // Stores a number where 0 is stored. input: index in the block; output: index in the panel.
  void put(int64_t input, int64_t output, uint8_t number) {
    Group& group = groups[input / kGroup];
    input %= kGroup;
    group.low[input / 4][output % kColumns][input % 4] |= (number & kLowMask) << low_shift(output);
    if constexpr (kHighBits > 0)
      group.high[input / kInputs][output] |= static_cast<uint32_t>(number >> 4 & kHighMask) << high_shift(input);
  }
  // Not rounded: number, integer scale and unit have 24 significant bits together.
  float weight(int64_t input, int64_t output) const {
    const Group& group = groups[input / kGroup];
    input %= kGroup;
    int32_t number = group.low[input / 4][output % kColumns][input % 4] >> low_shift(output) & kLowMask;
    if constexpr (kHighBits > 0)
      number |= static_cast<int32_t>(group.high[input / kInputs][output] >> high_shift(input) & kHighMask) << 4;
    const auto factor = [&](const Factor* factors, int64_t unit) {
      const auto own = static_cast<float>(factors[output]);
      if constexpr (kHasUnits) return own * static_cast<float>(units[unit][output]);
      return own;
    };
    const float scaled = static_cast<float>(number - kZero) * factor(group.scales[input / kInputs], 0);
    if constexpr (kSymmetric) return scaled;
    return scaled - factor(group.minimums[input / kInputs], 1);
  }
  // The scales or minimums of a vector of outputs.
  PAGEWIRE_INLINE Vec factors(const Factor (&of_panel)[kPanel], int64_t unit, int64_t output) const {
    const Vec own = widen(of_panel + output);
    if constexpr (kHasUnits) return own * widen(units[unit] + output);
    return own;
  }

 private:
  static constexpr int64_t kColumns = kPanel * kLowBits / 8;
  static constexpr int kLowMask = (1 << kLowBits) - 1, kHighMask = (1 << kHighBits) - 1;

  static int low_shift(int64_t output) { return static_cast<int>(output / kColumns) * 4; }
  static int high_shift(int64_t input) {
    return static_cast<int>(8 * (input % 4) + 4 + kHighBits * (input % kInputs / 4)) % 32;
  }
};

// Block types, each of another size in bytes, which identifies the type.
template <typename... Kinds>
struct BlockKinds {
  static_assert(((sizeof(Kinds) % 64 == 0) && ...));
  // The types with the size of `Kind`.
  template <typename Kind>
  static constexpr int kOfItsSize = ((sizeof(Kind) == sizeof(Kinds) ? 1 : 0) + ...);
  static_assert(((kOfItsSize<Kinds> == 1) && ...));

  // Calls apply(block) for the first type with is(block). Returns whether there is one.
  template <typename Is, typename Apply>
  static bool visit(const Is& is, const Apply& apply) {
    return ((is(Kinds()) && (apply(Kinds()), true)) || ...);
  }
};
using WeightBlocks = BlockKinds<
    WeightBlock<4, 32, false>, WeightBlock<4, 32, true>, WeightBlock<5, 32, false>, WeightBlock<5, 32, true>,
    WeightBlock<8, 32, false>, WeightBlock<8, 32, true>, WeightBlock<8, 16, false>,
    WeightBlock<4, 32, false, uint8_t>, WeightBlock<5, 32, false, uint8_t>, WeightBlock<6, 16, true, int8_t>>;

// The rows of x in 8 bits, in groups of 32 inputs; the last is padded with 0.
struct Int8Rows {
  // scaled_sums: scale times the sum of the group, of its first half, and of its second. corrections: minus `zero`
  // times these sums.
  struct Group {
    float scale, scaled_sums[3];
    int32_t corrections[3];
  };
  int64_t groups;  // groups of a row
  Buffer<int8_t> numbers;
  Buffer<Group> of_groups;

  // If a number of a group is not finite, neither are its scale and sums. zero: the weights' number for 0.
  Int8Rows(const at::BFloat16* x, const Sizes& sizes, int32_t zero)
      : groups(groups_of(sizes.inputs)), numbers(sizes.rows * groups * kGroup), of_groups(sizes.rows * groups) {
    parallel_for(sizes.rows, rows_a_thread(sizes.inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t place = row * groups + group, first = group * kGroup;
          of_groups[place] = round_group(
              x + row * sizes.x_stride + first, std::min(kGroup, sizes.inputs - first), zero,
              numbers.data() + place * kGroup);
        }
    });
  }

 private:
  static Group round_group(const at::BFloat16* x, int64_t count, int32_t zero, int8_t* numbers) {
    const float scale = count == kGroup ? round_to_8_bits(x, kGroup, numbers) : round_to_8_bits(x, count, numbers);
    const auto [first, second] = sums_of_halves(numbers);
    const auto scaled = [&](int32_t sum) { return scale * static_cast<float>(sum); };
    const int32_t all = first + second;
    return {scale, {scaled(all), scaled(first), scaled(second)}, {-zero * all, -zero * first, -zero * second}};
  }
  static std::pair<int32_t, int32_t> sums_of_halves(const int8_t* numbers) {
    constexpr int64_t kHalf = kGroup / 2;
#if defined(__AVX2__)
    const auto sums_of_fours = [](const int8_t* half) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half));
      return _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), bytes), _mm_set1_epi16(1));
    };
    const __m128i sums = _mm_hadd_epi32(sums_of_fours(numbers), sums_of_fours(numbers + kHalf));
    const __m128i both = _mm_hadd_epi32(sums, sums);
    return {_mm_cvtsi128_si32(both), _mm_extract_epi32(both, 1)};
#else
    return {std::accumulate(numbers, numbers + kHalf, 0), std::accumulate(numbers + kHalf, numbers + kGroup, 0)};
#endif
  }
};

constexpr int64_t kPanelVectors = kPanel / kLanes;
// Rows of a tile: its sums should stay in registers. AVX-512 has 32; with 6 rows, GCC 12 would hold float sums in
// memory, and tiles would be 13% slower. AVX2 has 16, and a row takes 4 for integer and 4 for float sums. NEON has 32,
// and a row takes 8 and 8; float sums are in memory, updated once a group.
constexpr int kGroupedTileRows = kPanelVectors == 2 ? 4 : kPanelVectors == 8 ? 2 : 1;

// Tiles up to which every tile unpacks a panel's weights. Above, costly weights are unpacked once, to bytes: with
// AVX-512, 5 and 6 bits are a fifth faster, 4 bits are not.
constexpr int64_t kMaxPackedTiles = 2;
template <typename Block>
constexpr bool kIsCostly = Block::kHighBits > 0 || (Block::kLowBits == 4 && kPanelVectors > 2);

// Reads a panel's numbers in order, four inputs at a time. The caller calls `enter` before each group with one scale.
template <typename Block>
struct PackedNumbers {
  const Block* blocks;
  const typename Block::Group* own = nullptr;
  Ints high[kPanelVectors] = {};

  PAGEWIRE_INLINE void enter(int64_t group, int64_t part) {
    own = blocks[group / Block::kGroups].groups + group % Block::kGroups;
    if constexpr (Block::kHighBits > 0)
      for (int j = 0; j < kPanelVectors; ++j) high[j] = load_bytes(own->high[part] + j * kLanes);
  }
  PAGEWIRE_INLINE void read(int64_t four, Ints (&bytes)[kPanelVectors]) {
    for (int j = 0; j < kPanelVectors; ++j) {
      constexpr int kLoads = kPanelVectors * Block::kLowBits / 8;
      bytes[j] = load_bytes(own->low[four][j % kLoads * kLanes]);
      if constexpr (Block::kLowBits == 4) bytes[j] = half_of(bytes[j], j >= kLoads);
      if constexpr (Block::kHighBits > 0) {
        bytes[j] = with_bits(bytes[j], high[j], ((1 << Block::kHighBits) - 1) << 4);
        high[j] = turned_right<Block::kHighBits>(high[j]);
      }
    }
  }
};

// A panel's numbers, unpacked to one byte each.
struct WideNumbers {
  static constexpr int64_t kGroupBytes = kGroup * kPanel;

  const uint8_t* numbers;  // [groups][8][32][4]
  const uint8_t* group_numbers = nullptr;

  PAGEWIRE_INLINE void enter(int64_t group, int64_t) { group_numbers = numbers + group * kGroupBytes; }
  PAGEWIRE_INLINE void read(int64_t four, Ints (&bytes)[kPanelVectors]) const {
    for (int j = 0; j < kPanelVectors; ++j) bytes[j] = load_bytes(group_numbers + (four * kPanel + j * kLanes) * 4);
  }
};

template <typename Block>
WideNumbers widen_numbers(PackedNumbers<Block> packed, int64_t groups) {
  static thread_local Buffer<uint8_t> wide;
  if (static_cast<int64_t>(wide.size()) < groups * WideNumbers::kGroupBytes)
    wide.resize(groups * WideNumbers::kGroupBytes);
  constexpr int64_t kFours = kGroup / 4 / Block::kScales;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t four = 0; four < kGroup / 4; ++four) {
      if (four % kFours == 0) packed.enter(group, four / kFours);
      Ints bytes[kPanelVectors];
      packed.read(four, bytes);
      __builtin_memcpy(
          wide.data() + group * WideNumbers::kGroupBytes + four * kPanel * 4, bytes, sizeof(bytes));
    }
  return {wide.data()};
}

template <int kRows>
inline void put_tile(
    const Vec (&sums)[kRows][kPanelVectors], const Sizes& sizes, const at::BFloat16* bias, const Results& out,
    int64_t row, int64_t panel) {
  for (int j = 0; j < kPanelVectors; ++j) {
    const int64_t output = panel * kPanel + j * kLanes, left = std::min(kLanes, sizes.outputs - output);
    if (left <= 0) break;
    const Vec added = bias == nullptr ? Vec(0) : widen(bias + output, left);
    for (int i = 0; i < kRows; ++i) out.put((row + i) * sizes.outputs + output, sums[i][j] + added, left);
  }
}

template <int kRows, typename Block, typename Numbers, typename Next>
inline void multiply_grouped_tile(
    const Block* weights, Numbers numbers_of, Next next, const Int8Rows& x, const Sizes& sizes,
    const at::BFloat16* bias, const Results& out, int64_t row, int64_t panel) {
  constexpr int64_t kFours = kGroup / 4 / Block::kScales;
  const int8_t* numbers = x.numbers.data() + row * x.groups * kGroup;
  const Int8Rows::Group* of_groups = x.of_groups.data() + row * x.groups;
  for (int i = 0; i < kRows; ++i) out.fetch((row + i) * sizes.outputs + panel * kPanel);
  Vec sums[kRows][kPanelVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kPanelVectors; ++j) sums[i][j] = Vec(0);
  for (int64_t group = 0; group < x.groups; ++group) {
    const Block& block = weights[group / Block::kGroups];
    const auto& own = block.groups[group % Block::kGroups];
    next.fetch();
    for (int64_t part = 0; part < Block::kScales; ++part) {
      const int64_t half = Block::kScales == 1 ? 0 : 1 + part;
      Ints dots[kRows][kPanelVectors];
      for (int i = 0; i < kRows; ++i)
        for (auto& dot : dots[i]) dot = same_in_all(of_groups[i * x.groups + group].corrections[half]);
      numbers_of.enter(group, part);
      for (int64_t four = part * kFours; four < (part + 1) * kFours; ++four) {
        Ints bytes[kPanelVectors];
        numbers_of.read(four, bytes);
        for (int i = 0; i < kRows; ++i) {
          int32_t inputs;
          __builtin_memcpy(&inputs, numbers + (i * x.groups + group) * kGroup + 4 * four, sizeof(inputs));
          const Ints same = same_in_all(inputs);
          for (int j = 0; j < kPanelVectors; ++j) dots[i][j] = add_dots<Block::kBits>(dots[i][j], bytes[j], same);
        }
      }
      for (int j = 0; j < kPanelVectors; ++j) {
        const Vec scale = block.factors(own.scales[part], 0, j * kLanes);
        for (int i = 0; i < kRows; ++i)
          sums[i][j] = at::vec::fmadd(
              to_float(dots[i][j]), scale * Vec(of_groups[i * x.groups + group].scale), sums[i][j]);
        if constexpr (!Block::kSymmetric) {
          const Vec minimum = block.factors(own.minimums[part], 1, j * kLanes);
          for (int i = 0; i < kRows; ++i)
            sums[i][j] =
                at::vec::fnmadd(minimum, Vec(of_groups[i * x.groups + group].scaled_sums[half]), sums[i][j]);
        }
      }
    }
  }
  put_tile<kRows>(sums, sizes, bias, out, row, panel);
}

// weights: [panels, blocks]. x: [rows, inputs], rows `x_stride` elements apart. bias: [outputs] or null.
template <typename Block>
void multiply_grouped(
    const Block* weights, const at::BFloat16* x, const Sizes& sizes, const at::BFloat16* bias, const Results& out) {
  const Int8Rows rounded(x, sizes, Block::kZero - kTakenOff<Block::kBits>);
  for_panels<kGroupedTileRows>(sizes, [&](const auto& chunk, int64_t panel) {
    const int64_t blocks = rounded.groups / Block::kGroups;
    const Block* own = weights + panel * blocks;
    const auto multiply_tile = [&](const auto& numbers, int64_t tile, auto next) {
      chunk.for_rows(tile, [&](auto rows, int64_t first) {
        multiply_grouped_tile<decltype(rows)::value>(own, numbers, next, rounded, sizes, bias, out, first, panel);
      });
    };
    const auto multiply_tiles = [&](const auto& numbers) {
      for (int64_t tile = 0; tile < chunk.tiles(); ++tile)
        multiply_tile(numbers, tile, Ahead(own + blocks, blocks, tile, chunk.tiles(), rounded.groups));
    };
    const PackedNumbers<Block> packed{own};
    if (chunk.tiles() == 1) return multiply_tile(packed, 0, NothingAhead());
    if (kIsCostly<Block> && chunk.tiles() > kMaxPackedTiles) return multiply_tiles(widen_numbers(packed, rounded.groups));
    multiply_tiles(packed);
  });
}

}  // namespace pagewire
