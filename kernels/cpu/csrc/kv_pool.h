// A layer's keys and values: [blocks, 2 or 1, block_size, num_kv_heads, head], with any strides of blocks and of keys and
// values. A head of an 8-bit pool (`narrow`) is int8 values, then their scale.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace pagewire {

constexpr int64_t kScaleBytes = sizeof(float);

template <typename T>
struct KvPool {
  T* wide;  // either this or `narrow` is set
  int8_t* narrow;
  int64_t block_stride, part_stride;  // in elements; part_stride 0: a head's key is also its value

  // Offset of a slot's keys.
  int64_t place(int64_t slot, int64_t block_size, int64_t num_kv_heads, int64_t head_dim) const {
    return slot / block_size * block_stride + slot % block_size * num_kv_heads * head_size(head_dim);
  }
  int64_t head_size(int64_t head_dim) const { return narrow != nullptr ? head_dim + kScaleBytes : head_dim; }
};

template <typename T>
inline void narrow_head(const T* head, int64_t head_dim, int8_t* target) {
  const float scale = round_to_8_bits(head, head_dim, target);
  std::memcpy(target + head_dim, &scale, sizeof(scale));
}

template <typename T>
inline void widen_head(const int8_t* head, int64_t head_dim, T* target) {
  float scale;
  std::memcpy(&scale, head + head_dim, sizeof(scale));
  for_each_vector(head_dim, [&](int64_t i, int64_t n) { store(target + i, widen(head + i, n) * Vec(scale), n); });
}

}  // namespace pagewire
