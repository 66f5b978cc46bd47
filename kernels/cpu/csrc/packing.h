// Functions that pack a weight, multiply by a packed weight, and read rows of a packed weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace pagewire {

// Whether weights with this number of inputs can be packed.
bool can_pack(int64_t inputs);

// Whether int8 weights with this number of inputs can be packed, which requires bf16 dot products.
bool can_pack_int8(int64_t inputs);

// Packs a weight, [outputs, inputs]. For bf16, returns [panels, inputs / 2, 32, 2]. For float32 and float16, returns
// [panels, inputs, 32].
at::Tensor pack(const at::Tensor& weight);

// Packs an int8 weight. weight: [outputs, inputs] of int8; scales: [outputs, groups] of bf16. Returns [panels, groups,
// bytes of a group]. The last group of an output may have fewer weights.
at::Tensor pack_int8(const at::Tensor& weight, const at::Tensor& scales);

// Packs a weight of few bits (see grouped.h). numbers: [outputs, inputs] of uint8, below 2 to the power of `bits`.
// scales, minimums: [outputs, groups] of float16; a group has 32 or 16 inputs. Without minimums, the middle number
// stands for zero. units: [outputs, inputs / 256, 2] of float16, or [outputs, inputs / 256, 1] without minimums. With
// units, scales and minimums are uint8, and are multiplied by the units. With units and without minimums, scales are
// int8. Returns [panels, blocks, bytes of a block]. The last group of an output may have fewer weights.
at::Tensor pack_grouped(
    const at::Tensor& numbers, const at::Tensor& scales, const std::optional<at::Tensor>& minimums, int64_t bits,
    const std::optional<at::Tensor>& units);

// Packs a weight for w8a8.h. weight: [outputs, inputs] of int8; scales: [outputs, groups] of float32. A group has 64
// inputs; the last group may have fewer inputs. Returns [panels, groups, bytes of a group].
at::Tensor pack_w8a8(const at::Tensor& weight, const at::Tensor& scales);

// Reads rows of a packed weight. packed: from `pack`, `pack_grouped` or `pack_w8a8`; rows: [rows] int64, the outputs to
// read. Returns [rows, inputs] in float32.
at::Tensor packed_rows(const at::Tensor& packed, const at::Tensor& rows, int64_t outputs, int64_t inputs);

// Multiplies by a packed weight. x: [rows, inputs], of float32 or float16 for weights of this type, otherwise of bf16;
// packed: from `pack`, `pack_int8`, `pack_grouped` or `pack_w8a8`; wide: whether the result is float32.
at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, bool wide);

}  // namespace pagewire
