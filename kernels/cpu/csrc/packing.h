// Packs weights, multiplies by them, and reads their rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace pagewire {

// Whether weights with so many inputs can be packed.
bool can_pack(int64_t inputs);

// Whether int8 weights can be packed, which needs bf16 dot products.
bool can_pack_int8(int64_t inputs);

// weight: [outputs, inputs]. Returns [panels, inputs / 2, 32, 2] for bf16, [panels, inputs, 32] for float32 and
// float16.
at::Tensor pack(const at::Tensor& weight);

// For matmul.h. weight: [outputs, inputs] int8; scales: [outputs, groups] bf16. Returns [panels, groups, bytes of a
// group]. An output's last group may have fewer weights.
at::Tensor pack_int8(const at::Tensor& weight, const at::Tensor& scales);

// For grouped.h. numbers: [outputs, inputs] uint8, below 2 to the power of `bits`. scales, minimums: [outputs, groups]
// float16; groups have 32 or 16 inputs, the last maybe fewer. Without minimums, the middle number means zero. units:
// [outputs, inputs / 256, 2] float16, or [outputs, inputs / 256, 1] without minimums; with units, scales and minimums
// are uint8 multiples, or scales int8 without minimums. Returns [panels, blocks, bytes of a block].
at::Tensor pack_grouped(
    const at::Tensor& numbers, const at::Tensor& scales, const std::optional<at::Tensor>& minimums, int64_t bits,
    const std::optional<at::Tensor>& units);

// For w8a8.h. weight: [outputs, inputs] int8; scales: [outputs, groups] float32; groups have 64 inputs, the last maybe
// fewer. Returns [panels, groups, bytes of a group].
at::Tensor pack_w8a8(const at::Tensor& weight, const at::Tensor& scales);

// For mx_float4.h. numbers: [outputs, inputs] uint8, e2m1 in the lower four bits; a multiple of 32 inputs. scales:
// [outputs, inputs / 32] uint8, exponents of two plus 127, at most 252. Returns [panels, blocks, lines of a block, 64].
at::Tensor pack_mx_float4(const at::Tensor& numbers, const at::Tensor& scales);

// packed: from `pack`, `pack_grouped` or `pack_w8a8`. rows: [rows] int64, outputs. Returns [rows, inputs] float32.
at::Tensor packed_rows(const at::Tensor& packed, const at::Tensor& rows, int64_t outputs, int64_t inputs);

// x: [rows, inputs], in the weights' type for float32 and float16, otherwise bf16. packed: from `pack`, `pack_int8`,
// `pack_grouped`, `pack_w8a8` or `pack_mx_float4`. wide: whether the result is float32.
at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, bool wide);

}  // namespace pagewire
