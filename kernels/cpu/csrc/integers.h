// Vectors of 32-bit integers, with the lanes of a float32 vector. A lane may have four bytes, for dot products.
//
// x86 multiplies unsigned bytes (weights) by signed bytes (inputs), NEON signed by signed: there, 128 is subtracted
// from 8-bit weights, and the caller adds 128 times the sum of the inputs, exactly. ARM's i8mm would save an
// instruction for each four weights of a tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace pagewire {

#if defined(__AVX512BW__)
using Ints = __m512i;
inline Ints same_in_all(int32_t word) { return _mm512_set1_epi32(word); }
inline Ints load_bytes(const void* bytes) { return _mm512_loadu_si512(bytes); }
// bytes | (others & mask), with the same mask for each byte.
inline Ints with_bits(Ints bytes, Ints others, int8_t mask) {
  return _mm512_ternarylogic_epi32(bytes, others, _mm512_set1_epi8(mask), 0xF8);
}
template <int kBits>
inline Ints turned_right(Ints words) {
  return _mm512_ror_epi32(words, kBits);
}
inline Ints half_of(Ints bytes, bool upper) {
  return _mm512_and_si512(upper ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
}
// Adds dot products of four bytes. Weights have at most 7 bits, so that two products fit into 16 bits.
inline Ints add_small_dots(Ints sums, Ints weights, Ints x, int16_t factor = 1) {
#if defined(__AVX512VNNI__)
  if (factor == 1) return _mm512_dpbusd_epi32(sums, weights, x);
#endif
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(weights, x), _mm512_set1_epi16(factor)));
}
inline Vec to_float(Ints sums) { return _mm512_cvtepi32_ps(sums); }
#elif defined(__AVX2__)
using Ints = __m256i;
inline Ints same_in_all(int32_t word) { return _mm256_set1_epi32(word); }
inline Ints load_bytes(const void* bytes) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); }
inline Ints with_bits(Ints bytes, Ints others, int8_t mask) {
  return _mm256_or_si256(bytes, _mm256_and_si256(others, _mm256_set1_epi8(mask)));
}
template <int kBits>
inline Ints turned_right(Ints words) {
  return _mm256_or_si256(_mm256_srli_epi32(words, kBits), _mm256_slli_epi32(words, 32 - kBits));
}
inline Ints half_of(Ints bytes, bool upper) {
  return _mm256_and_si256(upper ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}
inline Ints add_small_dots(Ints sums, Ints weights, Ints x, int16_t factor = 1) {
#if defined(__AVXVNNI__)
  if (factor == 1) return _mm256_dpbusd_avx_epi32(sums, weights, x);
#endif
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(factor)));
}
inline Vec to_float(Ints sums) { return _mm256_cvtepi32_ps(sums); }
#elif defined(__aarch64__)
using Ints = int32x4_t;
inline Ints same_in_all(int32_t word) { return vdupq_n_s32(word); }
inline Ints load_bytes(const void* bytes) { return vld1q_s32(static_cast<const int32_t*>(bytes)); }
inline Ints with_bits(Ints bytes, Ints others, int8_t mask) {
  return vbslq_s32(vreinterpretq_u32_s8(vdupq_n_s8(mask)), others, bytes);
}
template <int kBits>
inline Ints turned_right(Ints words) {
  const uint32x4_t bits = vreinterpretq_u32_s32(words);
  return vreinterpretq_s32_u32(vsriq_n_u32(vshlq_n_u32(bits, 32 - kBits), bits, kBits));
}
inline Ints half_of(Ints bytes, bool upper) {
  const uint8x16_t all = vreinterpretq_u8_s32(bytes);
  return vreinterpretq_s32_u8(upper ? vshrq_n_u8(all, 4) : vandq_u8(all, vdupq_n_u8(15)));
}
// Adds dot products of four bytes. Weights are signed; two products are at most 2 * 128 * 127, within 16 bits.
inline Ints add_signed_dots(Ints sums, Ints weights, Ints x) {
  const int8x16_t own = vreinterpretq_s8_s32(weights), other = vreinterpretq_s8_s32(x);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, own, other);
#else
  const int16x8_t first = vmull_s8(vget_low_s8(own), vget_low_s8(other)), second = vmull_high_s8(own, other);
  return vpadalq_s16(sums, vpaddq_s16(first, second));
#endif
}
inline Vec to_float(Ints sums) { return vcvtq_f32_s32(sums); }
#else
struct Ints {
  int32_t each[kLanes];
};
inline Ints same_in_all(int32_t word) {
  Ints all;
  std::fill_n(all.each, kLanes, word);
  return all;
}
inline Ints load_bytes(const void* bytes) {
  Ints all;
  __builtin_memcpy(all.each, bytes, sizeof(all.each));
  return all;
}
inline Ints with_bits(Ints bytes, Ints others, int8_t mask) {
  for (int64_t i = 0; i < kLanes; ++i) bytes.each[i] |= others.each[i] & (0x01010101 * mask);
  return bytes;
}
template <int kBits>
inline Ints turned_right(Ints words) {
  for (auto& word : words.each) {
    const auto bits = static_cast<uint32_t>(word);
    word = static_cast<int32_t>(bits >> kBits | bits << (32 - kBits));
  }
  return words;
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

// sums[i] += sum of 4 products (u8 weight - kTakenOff) * s8 input; weights have kBits bits.
#if defined(__aarch64__)
template <int kBits>
constexpr int32_t kTakenOff = kBits == 8 ? 128 : 0;

template <int kBits>
inline Ints add_dots(Ints sums, Ints weights, Ints x) {
  if constexpr (kTakenOff<kBits> != 0)  // flips the highest bit: minus 128
    weights = veorq_s32(weights, vreinterpretq_s32_u8(vdupq_n_u8(kTakenOff<kBits>)));
  return add_signed_dots(sums, weights, x);
}
#else
template <int kBits>
constexpr int32_t kTakenOff = 0;

template <int kBits>
inline Ints add_dots(Ints sums, Ints weights, Ints x) {
#if !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  if constexpr (kBits == 8)
    return add_small_dots(add_small_dots(sums, half_of(weights, false), x), half_of(weights, true), x, 16);
#endif
  return add_small_dots(sums, weights, x);
}
#endif

}  // namespace pagewire
