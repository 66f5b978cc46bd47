// x @ weightᵀ + bias for bf16 x and packed weights in MXFP4 (OCP Microscaling Formats, 2023). Sums are float32.
//
// A weight is a float of 4 bits (e2m1), times a power of two that 32 neighbouring inputs of an output share. bf16 and
// float32 represent both factors and their product exactly. Weights are widened in registers, and multiplied in the
// order of matmul.h, so that a product has the bits of the product by the same weights in bf16, and is batch-invariant.
// With several tiles, a panel is widened once, in a core's cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "matmul.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kMx4Groups = 2;  // of a block, which so fills whole cache lines
constexpr float kMx4Magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

// A panel's outputs for two groups of 32 inputs.
struct Mx4Block {
  uint8_t scales[kMx4Groups][kPanel];                // exponents of two, plus 126
  uint8_t numbers[kMx4Groups][kGroup / 2][kPanel];  // of two neighbouring inputs, the first in the lower bits

  // Stores a weight where 0 is stored. input: index in the block; output: index in the panel. Weights below 2^-123,
  // whose exponents do not fit, become 0.
  void put(int64_t input, int64_t output, uint8_t number, uint8_t scale) {
    const int64_t group = input / kGroup;
    scales[group][output] = std::max<uint8_t>(scale, 1) - 1;
    if (scale >= kMinScale) numbers[group][input % kGroup / 2][output] |= (number & 15) << 4 * (input % 2);
  }

  static constexpr uint8_t kMinScale = 2, kMaxScale = 252;  // exponents plus 127; six times more is not finite
};
static_assert(sizeof(Mx4Block) % 64 == 0);

inline int64_t mx4_blocks_of(int64_t inputs) { return (groups_of(inputs) + kMx4Groups - 1) / kMx4Groups; }

#if defined(__AVX512BF16__)

struct Mx4Panel {
  static constexpr int64_t kStretch = kGroup;

  const Mx4Block* blocks;
  Ahead ahead;
  const uint8_t* numbers = nullptr;  // of the group, [16][32]
  int64_t first = 0;                 // first input of the group
  __m512i exponents[2] = {};         // each for 16 outputs and both inputs of a pair, in the place of bf16's exponent

  PAGEWIRE_INLINE void enter(int64_t input) {
    ahead.fetch();
    const int64_t group = input / kGroup;
    const Mx4Block& block = blocks[group / kMx4Groups];
    numbers = block.numbers[group % kMx4Groups][0];
    first = input;
    for (int half = 0; half < 2; ++half) {
      const __m512i single = _mm512_slli_epi32(bytes(block.scales[group % kMx4Groups] + half * 16), 7);
      exponents[half] = _mm512_or_si512(single, _mm512_slli_epi32(single, 16));
    }
  }
  PAGEWIRE_INLINE void read(int64_t input, __m512bh& low, __m512bh& high) const {
    const uint8_t* source = numbers + (input - first) / 2 * kPanel;
    low = widened(source, exponents[0]);
    high = widened(source + 16, exponents[1]);
  }

 private:
  PAGEWIRE_INLINE static __m512i bytes(const uint8_t* source) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  // 16 pairs. The permutation reads the lower five bits of each 16-bit lane, and its table has each number twice.
  PAGEWIRE_INLINE static __m512bh widened(const uint8_t* source, __m512i exponents) {
    const __m512i pairs = bytes(source), codes = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
    // bf16 numbers whose exponents are 126 too small, by sign and magnitude.
    const __m256i small = _mm256_set_epi16(
        -0x7E40, -0x7E80, -0x7EC0, -0x7F00, -0x7F40, -0x7F80, -0x8000, -0x8000, 0x1C0, 0x180, 0x140, 0x100, 0xC0, 0x80,
        0, 0);
    const __m512i numbers = _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(small));
    const __mmask32 is_not_zero = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(7));
    return (__m512bh)_mm512_mask_add_epi16(numbers, is_not_zero, numbers, exponents);
  }
};

#else

// As many bytes as a vector has lanes.
inline Pairs widen_bytes(const uint8_t* source) {
#if defined(__AVX512F__)
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#elif defined(__AVX2__)
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#else
  int32_t each[kLanes];
  std::copy_n(source, kLanes, each);
  return Pairs::loadu(each);
#endif
}

// The numbers in the lower four bits of each lane.
inline Vec widen_e2m1(const Pairs& codes) {
#if defined(__AVX512F__)
  const __m512 magnitudes = _mm512_castps256_ps512(_mm256_loadu_ps(kMx4Magnitudes));
  const __m256 negative = _mm256_xor_ps(_mm256_loadu_ps(kMx4Magnitudes), _mm256_set1_ps(-0.0f));
  return _mm512_permutexvar_ps(codes, _mm512_insertf32x8(magnitudes, negative, 1));
#elif defined(__AVX2__)
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kMx4Magnitudes), codes);
  const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
  return _mm256_xor_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
#else
  int32_t code[kLanes];
  float each[kLanes];
  codes.store(code);
  for (int64_t i = 0; i < kLanes; ++i) each[i] = (code[i] & 8 ? -1.0f : 1.0f) * kMx4Magnitudes[code[i] & 7];
  return Vec::loadu(each);
#endif
}

struct Mx4Panel {
  static constexpr int64_t kStretch = kGroup;

  const Mx4Block* blocks;
  Ahead ahead;
  const uint8_t* numbers = nullptr;  // of the group, [16][32]
  int64_t first = 0;                 // first input of the group
  Vec scales[kVectors] = {};

  PAGEWIRE_INLINE void enter(int64_t input) {
    ahead.fetch();
    const int64_t group = input / kGroup;
    const Mx4Block& block = blocks[group / kMx4Groups];
    numbers = block.numbers[group % kMx4Groups][0];
    first = input;
    for (int64_t j = 0; j < kVectors; ++j) {
      const Pairs exponents = widen_bytes(block.scales[group % kMx4Groups] + j * kLanes) + Pairs(1);
      scales[j] = at::vec::cast<float, int32_t>(exponents << Pairs(23));
    }
  }
  PAGEWIRE_INLINE void read(int64_t input, int64_t j, Vec& one, Vec& other) const {
    const Pairs codes = widen_bytes(numbers + (input - first) / 2 * kPanel + j * kLanes);
    one = widen_e2m1(codes) * scales[j];
    other = widen_e2m1(codes >> Pairs(4)) * scales[j];
  }
};

#endif

struct Mx4Weights {
  const Mx4Block* packed;  // [panels, blocks]

  template <typename F>
  void for_tiles(int64_t panel, int64_t inputs, int64_t tiles, const F& tile) const {
    const int64_t blocks = mx4_blocks_of(inputs);
    const Mx4Block* own = packed + panel * blocks;
    const auto ahead = [&](int64_t part, int64_t parts) {
      return Ahead(own + blocks, blocks, part, parts, groups_of(inputs));
    };
    for_narrow_tiles<Mx4Panel>(own, ahead, inputs, tiles, tile);
  }
};

}  // namespace pagewire
