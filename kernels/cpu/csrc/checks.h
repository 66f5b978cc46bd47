// Checks of arguments from Python.
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

}  // namespace pagewire
