// The sampler's operations on a row of logits, defined in kernels/sampling/eager.py and noise.py.
//
// Gumbel noise takes two logarithms a token, but is at most 16.64, and exceeds g with a probability of about exp(-g).
// The part of the row with the largest logit is computed first; later tokens whose logit or hash cannot win need no
// logarithms.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "layer.h"

namespace pagewire {

constexpr int64_t kPart = 64;
constexpr float kMostNoise = 16.64f;  // -log(-log(1 - 2^-24)) is 16.6355

inline void keep(float* logits, const uint8_t* bits, int64_t length) {
  for (int64_t start = 0; start < length; start += 8) {
    const uint8_t kept = bits[start / 8];
    if (kept == 0xFF) continue;
    for (int64_t i = start; i < std::min(start + 8, length); ++i)
      if (!(kept >> (i - start) & 1)) logits[i] = -std::numeric_limits<float>::infinity();
  }
}

// Uniform numbers in (0, 1) for kPart tokens from `first` on.
inline void uniform_noise(uint64_t key, int64_t first, float* out) {
  const auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  for (int64_t i = 0; i < kPart; ++i) {
    uint32_t bits = static_cast<uint32_t>(first + i) * 0x9E3779B1u + low;
    bits = (bits ^ bits >> 16) * 0x21F0AAADu;
    bits = (bits ^ bits >> 15 ^ high) * 0x735A2D97u;
    bits ^= bits >> 15;
    out[i] = (static_cast<float>(static_cast<int32_t>(bits >> 9)) + 0.5f) * 0x1p-23f;
  }
}

struct Draw {
  float largest, temperature, log_min_p, top_p;
  int64_t top_k;
  uint64_t key;
};

// A thread's buffers.
struct Scratch {
  std::vector<float> tops, scaled, candidates;
};

inline void collect(const std::vector<float>& values, float least, std::vector<float>& out) {
  out.clear();
  for (const float value : values)
    if (value >= least) out.push_back(value);
}

// The smallest scaled logit that passes top-k, top-p and min-p (kernels/sampling/filters.py). scratch.scaled: the
// scaled row, whose maximum is 0. scratch.tops: the maximum of each part.
inline float threshold_of(const Draw& draw, Scratch& scratch) {
  const auto length = static_cast<int64_t>(scratch.scaled.size()), parts = static_cast<int64_t>(scratch.tops.size());
  auto& candidates = scratch.candidates;
  float floor = draw.log_min_p;
  // A bound that at least `count` scaled logits reach, and not many more. Reorders scratch.tops.
  const auto reached_by = [&](int64_t count) {
    if (count > parts) return -std::numeric_limits<float>::infinity();
    const auto place = scratch.tops.begin() + count - 1;
    std::nth_element(scratch.tops.begin(), place, scratch.tops.end(), std::greater<>());
    return *place;
  };
  if (draw.top_k > 0 && draw.top_k < length) {
    collect(scratch.scaled, reached_by(draw.top_k), candidates);
    const auto place = candidates.begin() + draw.top_k - 1;
    std::nth_element(candidates.begin(), place, candidates.end(), std::greater<>());
    floor = std::max(floor, *place);
  }
  if (!(draw.top_p < 1)) return floor;
  double mass = 0;
  for (int64_t i = 0; i < length; i += kLanes) {
    const int64_t count = std::min(kLanes, length - i);
    const Vec value = Vec::loadu(scratch.scaled.data() + i, count);
    Vec weight = Vec::blendv(Vec(0.0f), value.exp(), value >= Vec(floor));
    if (count < kLanes) weight = Vec::set(Vec(0.0f), weight, count);
    mass += sum(weight);
  }
  const float wanted = draw.top_p * static_cast<float>(mass);
  for (int64_t count = 32;; count *= 8) {
    const float least = std::max(floor, reached_by(count));
    collect(scratch.scaled, least, candidates);
    std::sort(candidates.begin(), candidates.end(), std::greater<>());
    float last = candidates.front();
    double before = 0;
    for (const float candidate : candidates) {
      const double weight = std::exp(candidate);
      if (!(before < wanted) || weight == 0) return last;
      last = candidate;
      before += weight;
    }
    if (count > parts) return last;  // all candidates have been searched
  }
}

// The token with the largest (logit - largest) / temperature + noise among scaled logits from the threshold on; among
// equals, the lowest id. Token 0 if draw.largest is not finite or is not the row's maximum.
template <typename T>
int64_t draw_one(const T* x, int64_t length, const Draw& draw, Scratch& scratch) {
  if (!std::isfinite(draw.largest)) return 0;
  const auto scaled = [&](float logit) { return (logit - draw.largest) / draw.temperature; };
  std::vector<float> tops((length + kPart - 1) / kPart);
  const auto parts = static_cast<int64_t>(tops.size());
  int64_t first_part = 0;
  for (int64_t part = 0; part < parts; ++part) {
    tops[part] = scaled(row_max(x + part * kPart, std::min(kPart, length - part * kPart)));
    if (std::isnan(tops[part])) return 0;
    if (tops[part] > tops[first_part]) first_part = part;
  }
  if (tops[first_part] != 0) return 0;
  float threshold = draw.log_min_p;
  if (draw.top_k > 0 || draw.top_p < 1) {
    scratch.scaled.resize(length);
    for (int64_t i = 0; i < length; ++i) scratch.scaled[i] = scaled(static_cast<float>(x[i]));
    scratch.tops = tops;
    threshold = threshold_of(draw, scratch);
  }
  float best = -std::numeric_limits<float>::infinity();
  int64_t token = 0;
  const auto look_into = [&](int64_t part) {
    const float gap = best - tops[part];
    if (tops[part] < threshold || gap > kMostNoise) return;
    const float most_below_1 = std::exp(-gap) * 1.001f;  // for noise that reaches the gap: 1 - u < -log(u)
    alignas(64) float uniform[kPart], scores[kLanes];
    const int64_t start = part * kPart, end = std::min(start + kPart, length);
    uniform_noise(draw.key, start, uniform);
    for (int64_t i = start; i < end; i += kLanes) {
      const Vec u = Vec::loadu(uniform + i - start);
      if (1.0f - largest(u) > most_below_1) continue;
      const int64_t count = std::min(kLanes, end - i);
      const Vec value = (widen(x + i, count) - Vec(draw.largest)) / Vec(draw.temperature);
      const Vec score = value + u.log().neg().log().neg();
      Vec::blendv(Vec(-std::numeric_limits<float>::infinity()), score, value >= Vec(threshold)).store(scores);
      for (int64_t lane = 0; lane < count; ++lane)
        if (scores[lane] > best || (scores[lane] == best && i + lane < token)) {
          best = scores[lane];
          token = i + lane;
        }
    }
  };
  look_into(first_part);
  for (int64_t part = 0; part < parts; ++part)
    if (part != first_part) look_into(part);
  return token;
}

}  // namespace pagewire
