// Weights that are packed once, multiplied in every step, and read back row by row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace pagewire {

// Whether weights with this number of inputs can be packed.
bool can_pack(int64_t inputs);

// The same for int8 weights, which need bf16 dot products.
bool can_pack_int8(int64_t inputs);

// weight: [outputs, inputs] of bf16, returns [panels, inputs / 2, 32, 2]; or of float32 or float16, returns [panels,
// inputs, 32].
at::Tensor pack(const at::Tensor& weight);

// weight: [outputs, inputs] of int8; scales: [outputs, groups] of bf16; returns [panels, groups, bytes of a group]. The
// last group of an output may have fewer weights than others.
at::Tensor pack_int8(const at::Tensor& weight, const at::Tensor& scales);

// numbers: [outputs, inputs] of uint8, below 2 to the power of `bits`. scales, minimums: [outputs, groups] of float16,
// for 32 or 16 inputs each; without minimums the middle number means zero. units: [outputs, inputs / 256, 2] of float16
// ([..., 1] without minimums). With units, scales and minimums are uint8 (int8 without minimums), and count units.
// Returns [panels, blocks, bytes of a block]. The last group of an output may have fewer weights than others.
at::Tensor pack_grouped(
    const at::Tensor& numbers, const at::Tensor& scales, const std::optional<at::Tensor>& minimums, int64_t bits,
    const std::optional<at::Tensor>& units);

// weight: [outputs, inputs] of int8; scales: [outputs, groups] of float32, for 64 inputs each (the last group may have
// fewer); returns [panels, groups, bytes of a group].
at::Tensor pack_w8a8(const at::Tensor& weight, const at::Tensor& scales);

// packed: from `pack`, `pack_grouped` or `pack_w8a8`; rows: [rows] int64, the outputs whose weights are read; returns
// [rows, inputs] in float32.
at::Tensor packed_rows(const at::Tensor& packed, const at::Tensor& rows, int64_t outputs, int64_t inputs);

// x: [rows, inputs] of bf16, or of the packed weight's type if that is float32 or float16; packed: from `pack`,
// `pack_int8`, `pack_grouped` or `pack_w8a8`; wide: whether the result is float32.
at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, bool wide);

}  // namespace pagewire
