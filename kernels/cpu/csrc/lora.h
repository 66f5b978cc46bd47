// Adds LoRA adapters, one for each row, to a linear layer's output. Defined in kernels/reference.py.
#pragma once

#include "team.h"
#include "vectors.h"

namespace pagewire {

template <typename T>
struct Lora {
  const T* a;             // [slots, parts, max_rank, inputs]
  const T* b;             // [slots, max_rank, outputs]
  const int32_t* ranks;   // [slots]
  const int64_t* starts;  // [parts + 1]: the first output of each part, then `outputs`
  int64_t parts, max_rank, inputs, outputs;
};

constexpr int64_t kSums = 8;  // parallel sums, because each addition waits for the sum before

// Dot products of x with kCount vectors, `length` elements apart. kCount does not change the bits.
template <int kCount, typename T>
inline void dots(const T* x, const T* y, int64_t length, float* products) {
  Vec sums[kCount];
  for (auto& one : sums) one = Vec(0.0f);
  for_each_vector(length, [&](int64_t i, int64_t n) {
    const Vec factor = widen(x + i, n);
    for (int k = 0; k < kCount; ++k) sums[k] = at::vec::fmadd(factor, widen(y + k * length + i, n), sums[k]);
  });
  for (int k = 0; k < kCount; ++k) products[k] = sum(sums[k]);
}

// Adds each row of b times its factor to kCount neighbouring vectors of y. kCount does not change the bits.
template <int kCount, typename Y, typename T>
inline void add_rows(Y* y, const T* b, int64_t stride, const float* factors, int64_t count) {
  Vec sums[kCount];
  for (auto& one : sums) one = Vec(0.0f);
  for (int64_t r = 0; r < count; ++r) {
    const Vec factor(factors[r]);
    for (int k = 0; k < kCount; ++k)
      sums[k] = at::vec::fmadd(factor, widen(b + r * stride + k * kLanes, kLanes), sums[k]);
  }
  for (int k = 0; k < kCount; ++k) store(y + k * kLanes, widen(y + k * kLanes, kLanes) + sums[k], kLanes);
}

// Batch-invariant: each row adds its inputs and ranks in order.
template <typename Y, typename T>
void add_lora(Y* y, const T* x, int64_t x_stride, const int32_t* slots, int64_t rows, const Lora<T>& lora) {
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    Buffer<float> inner(lora.max_rank);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t slot = slots[row];
      if (slot < 0) continue;
      const int64_t rank = lora.ranks[slot];
      if (rank == 0) continue;
      for (int64_t part = 0; part < lora.parts; ++part) {
        const T* a = lora.a + (slot * lora.parts + part) * lora.max_rank * lora.inputs;
        const T* own = x + row * x_stride;
        int64_t r = 0;
        for (; r + kSums <= rank; r += kSums) dots<kSums>(own, a + r * lora.inputs, lora.inputs, &inner[r]);
        for (; r < rank; ++r) dots<1>(own, a + r * lora.inputs, lora.inputs, &inner[r]);
        const int64_t first = lora.starts[part], count = lora.starts[part + 1] - first;
        const T* b = lora.b + slot * lora.max_rank * lora.outputs + first;
        Y* target = y + row * lora.outputs + first;
        int64_t done = 0;
        for (; done + kSums * kLanes <= count; done += kSums * kLanes)
          add_rows<kSums>(target + done, b + done, lora.outputs, inner.data(), rank);
        for_each_vector(count - done, [&](int64_t i, int64_t n) {
          Vec added(0.0f);
          for (int64_t k = 0; k < rank; ++k)
            added = at::vec::fmadd(Vec(inner[k]), widen(b + k * lora.outputs + done + i, n), added);
          store(target + done + i, widen(target + done + i, n) + added, n);
        });
      }
    }
  });
}

}  // namespace pagewire
