// What low-rank adapters add to a product, each row by its own adapter. kernels/reference.py says what it computes.
#pragma once

#include "team.h"
#include "vectors.h"

namespace pagewire {

template <typename T>
struct Lora {
  const T* a;             // [slots, parts, max_rank, inputs]
  const T* b;             // [slots, max_rank, outputs]
  const int32_t* ranks;   // [slots]
  const int64_t* starts;  // [parts + 1]: the first output of each part, and behind the last one `outputs`
  int64_t parts, max_rank, inputs, outputs;
};

template <typename T>
inline float dot(const T* x, const T* y, int64_t length) {
  Vec sums(0.0f);
  for_each_vector(length, [&](int64_t i, int64_t n) { sums = at::vec::fmadd(widen(x + i, n), widen(y + i, n), sums); });
  return sum(sums);
}

// A row's sums are over its own inputs and ranks, in their order, so that they do not depend on other rows.
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
        for (int64_t r = 0; r < rank; ++r) inner[r] = dot(x + row * x_stride, a + r * lora.inputs, lora.inputs);
        const int64_t first = lora.starts[part];
        const T* b = lora.b + slot * lora.max_rank * lora.outputs + first;
        Y* target = y + row * lora.outputs + first;
        for_each_vector(lora.starts[part + 1] - first, [&](int64_t i, int64_t n) {
          Vec added(0.0f);
          for (int64_t r = 0; r < rank; ++r)
            added = at::vec::fmadd(Vec(inner[r]), widen(b + r * lora.outputs + i, n), added);
          store(target + i, widen(target + i, n) + added, n);
        });
      }
    }
  });
}

}  // namespace pagewire
