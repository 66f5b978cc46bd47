// Checks of arguments from Python, and calls by their element types.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pagewire {

inline void check_like(const at::Tensor& tensor, const at::Tensor& other, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == other.scalar_type(), name, " must be on the CPU and ",
              other.scalar_type());
}

inline void check_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_numbers(const at::Tensor& tensor, at::ScalarType type, int64_t count, const char* name) {
  check_contiguous(tensor, name);
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.numel() == count, name, " must be ",
              count, " numbers of ", type);
}

inline void check_rows(const at::Tensor& rows, int64_t count) {
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const auto row = rows.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(0 <= row && row < count, "there is no row ", row);
  }
}

template <typename F>
inline void for_type(const at::Tensor& tensor, const F& apply) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return apply(float());
    case at::kHalf: return apply(at::Half());
    case at::kBFloat16: return apply(at::BFloat16());
    default: TORCH_CHECK(false, "tensors must be float32, float16 or bfloat16, not ", tensor.scalar_type());
  }
}

// Calls apply(element type of `tensor`, element type of `other`); `tensor` is float32 or of the type of `other`.
template <typename F>
inline void for_types(const at::Tensor& tensor, const at::Tensor& other, const F& apply) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == other.scalar_type(),
              "a tensor of ", tensor.scalar_type(), " does not go with one of ", other.scalar_type());
  for_type(other, [&](auto type) {
    tensor.scalar_type() == at::kFloat ? apply(float(), type) : apply(type, type);
  });
}

}  // namespace pagewire
