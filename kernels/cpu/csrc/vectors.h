// Vectors of the library's instruction set, loaded from and stored to any supported type as float32.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

namespace pagewire {

// Allocates whole cache lines.
template <typename T>
struct CacheLines {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};

  CacheLines() = default;
  template <typename U>
  CacheLines(const CacheLines<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kAlignment)); }
  void deallocate(T* place, size_t) { ::operator delete(place, kAlignment); }
  bool operator==(const CacheLines&) const { return true; }
};

// A std::vector from a cache line's start on, with 64-byte vectors in one line: attention is a twentieth faster.
template <typename T>
using Buffer = std::vector<T, CacheLines<T>>;

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

#if defined(__aarch64__)
// at::vec would convert int8 to float32 one number at a time.
inline Vec widen_four(const int8_t* source) {
  int32_t four;
  __builtin_memcpy(&four, source, sizeof(four));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(static_cast<uint32_t>(four))))));
}
inline Vec widen_four(const uint8_t* source) {
  uint32_t four;
  __builtin_memcpy(&four, source, sizeof(four));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
inline Vec widen_four(const at::BFloat16* source) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(source)), 16));
}
inline Vec widen_four(const at::Half* source) {
  return vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(source)));
}
#endif

// Loads `count` numbers as float32; the other lanes are 0.
template <typename T>
inline Vec widen(const T* source, int64_t count = kLanes) {
  if constexpr (std::is_same_v<T, float>) {
    return count == kLanes ? Vec::loadu(source) : Vec::loadu(source, count);
#if defined(__aarch64__)
  } else {
    T padded[kLanes] = {};
    if (count < kLanes) {
      std::copy_n(source, count, padded);
      source = padded;
    }
    return widen_four(source);
  }
#else
  } else if constexpr (sizeof(T) == 1) {
    T padded[kLanes] = {};
    if (count < kLanes) {
      std::copy_n(source, count, padded);
      source = padded;
    }
    [[maybe_unused]] constexpr bool kSigned = std::is_signed_v<T>;
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm512_cvtepi32_ps(kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
    return _mm256_cvtepi32_ps(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    float wide[kLanes];
    std::copy_n(source, kLanes, wide);
    return Vec::loadu(wide);
#endif
  } else {
    Vec wide;
    if (count == kLanes) {
      at::vec::load_to_float<T>(source, wide);
    } else {
      T padded[kLanes] = {};
      std::copy_n(source, count, padded);
      at::vec::load_to_float<T>(padded, wide);
    }
    return wide;
  }
#endif
}

// Stores float32 lanes in the tensor's type, rounded to nearest, ties to even.
template <typename T>
inline void store(T* target, const Vec& wide, int64_t count = kLanes) {
  if constexpr (std::is_same_v<T, float>) {
    wide.store(target, count);
#if defined(__AVX512BF16__)
  } else if constexpr (std::is_same_v<T, at::BFloat16>) {
    const auto narrow = (__m256i)_mm512_cvtneps_pbh(wide);
    if (count == kLanes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow);
    } else {
      _mm256_mask_storeu_epi16(target, static_cast<__mmask16>((1 << count) - 1), narrow);
    }
#endif
  } else {
    at::vec::convert_from_float<T>(wide, wide).store(target, count);
  }
}

// Rounds to nearest, ties to even.
inline at::vec::Vectorized<int32_t> to_integers(const Vec& x) {
#if defined(__aarch64__)
  return vcvtnq_s32_f32(x);
#else
  return at::vec::convert_to_int_of_same_size(x.round());
#endif
}

inline float sum(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

// The largest lane; NaN if any is NaN.
inline float largest(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

// Calls apply(index, lanes) for vectors that cover `count` elements. Only the last may have fewer than a vector's
// lanes.
template <typename F>
inline void for_each_vector(int64_t count, const F& apply) {
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) apply(index, kLanes);
  if (index < count) apply(index, count - index);
}

// Stores lanes as int8, rounded to nearest; they must fit.
inline void store_8_bits(const Vec& x, int64_t count, int8_t* numbers) {
  const auto whole = to_integers(x);
#if defined(__AVX512F__)
  if (count == kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers), _mm512_cvtepi32_epi8(whole));
#elif defined(__AVX2__)
  if (count == kLanes) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    return _mm_storel_epi64(reinterpret_cast<__m128i*>(numbers), _mm_packs_epi16(words, words));
  }
#endif
  int32_t each[kLanes];
  whole.store(each);
  for (int64_t i = 0; i < count; ++i) numbers[i] = static_cast<int8_t>(each[i]);
}

// The largest magnitude; not finite if any number is not.
template <typename T>
inline float largest_magnitude(const T* x, int64_t count) {
  Vec magnitudes(0);
  for_each_vector(count, [&](int64_t i, int64_t n) {
    magnitudes = at::vec::maximum(magnitudes, widen(x + i, n).abs());
  });
  return largest(magnitudes);
}
// Compares bf16 magnitudes as integers, which sort alike, in vectors of twice as many.
inline float largest_magnitude(const at::BFloat16* x, int64_t count) {
  uint16_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, static_cast<uint16_t>(x[i].x & 0x7FFF));
  return at::BFloat16(most, at::BFloat16::from_bits());
}

// Quantises x to int8, and returns the scale: the largest magnitude becomes 127, rounding is to nearest. If a number is
// not finite, the scale is NaN and all numbers are 0. Below 1e-36, all are 0, too.
template <typename T>
inline float round_to_8_bits(const T* x, int64_t count, int8_t* numbers) {
  const float most = largest_magnitude(x, count);
  if (!(most <= std::numeric_limits<float>::max())) {
    std::fill_n(numbers, count, static_cast<int8_t>(0));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const Vec factor(most > 1e-36f ? 127 / most : 0.0f);
  for_each_vector(count, [&](int64_t i, int64_t n) { store_8_bits(widen(x + i, n) * factor, n, numbers + i); });
  return most / 127;
}

}  // namespace pagewire
