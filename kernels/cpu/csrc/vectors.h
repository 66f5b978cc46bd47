// Loads and stores that compute in float32 whatever the tensor's type, in vectors of the instruction set built for.
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

// A std::vector none of whose 64-byte vectors straddles two cache lines: attention is a twentieth faster so.
template <typename T>
using Buffer = std::vector<T, CacheLines<T>>;

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// Lanes behind `count` are 0.
template <typename T>
inline Vec widen(const T* source, int64_t count = kLanes) {
  if constexpr (std::is_same_v<T, float>) {
    return count == kLanes ? Vec::loadu(source) : Vec::loadu(source, count);
  } else if constexpr (std::is_same_v<T, int8_t>) {
    int8_t padded[kLanes] = {};
    if (count < kLanes) {
      std::copy_n(source, count, padded);
      source = padded;
    }
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
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
}

// Rounds to nearest, ties to even.
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

inline float sum(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

// NaN where any lane is NaN.
inline float largest(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

// Calls `apply(index, lanes)` for consecutive vectors that cover `count` elements; only the last has fewer lanes.
template <typename F>
inline void for_each_vector(int64_t count, const F& apply) {
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) apply(index, kLanes);
  if (index < count) apply(index, count - index);
}

// Writes the numbers of 8 bits that are nearest to x in steps of a scale, which is returned: the largest of them has the
// magnitude 127. Where x is not finite the scale is NaN, and the numbers are 0, as those of less than 1e-36 are.
template <typename T>
inline float round_to_8_bits(const T* x, int64_t count, int8_t* numbers) {
  Vec magnitudes(0), products(0);
  for_each_vector(count, [&](int64_t i, int64_t n) {
    const Vec wide = widen(x + i, n);
    magnitudes = at::vec::maximum(magnitudes, wide.abs());
    products = products + wide * Vec(0);
  });
  const bool is_finite = sum(products) == 0;  // which is NaN where one of them is not
  const float most = is_finite ? largest(magnitudes) : 0.0f;
  const bool is_some = most > 1e-36f;
  const Vec factor(is_some ? 127 / most : 0.0f);
  for_each_vector(count, [&](int64_t i, int64_t n) {
    alignas(64) int32_t whole[kLanes] = {};
    if (is_some) at::vec::convert_to_int_of_same_size((widen(x + i, n) * factor).round()).store(whole);
    for (int64_t j = 0; j < n; ++j) numbers[i + j] = static_cast<int8_t>(whole[j]);
  });
  return is_finite ? most / 127 : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace pagewire
