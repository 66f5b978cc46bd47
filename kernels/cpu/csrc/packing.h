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

// Packs a weight matrix, which is [outputs, inputs]. The result is [panels, inputs / 2, 32, 2] for bf16, and [panels,
// inputs, 32] for float32 and float16.
at::Tensor pack(const at::Tensor& weight);

// Packs an int8 weight matrix for matmul.h. weight is [outputs, inputs] in int8. scales is [outputs, groups] in bf16.
// The result is [panels, groups, bytes of a group]. The last group of an output may have fewer weights than other
// groups.
at::Tensor pack_int8(const at::Tensor& weight, const at::Tensor& scales);

// Packs a weight matrix of 4, 5, 6 or 8 bits for grouped.h. numbers is [outputs, inputs] in uint8, each below 2 to the
// power of `bits`. scales and minimums are [outputs, groups] in float16; a group has 32 or 16 inputs. Without minimums,
// the middle number stands for the weight zero. units is [outputs, inputs / 256, 2] in float16, or [outputs, inputs /
// 256, 1] without minimums. If units are given, scales and minimums are uint8, and are multiplied by the units. If
// units are given without minimums, scales are int8. The result is [panels, blocks, bytes of a block]. The last group
// of an output may have fewer weights than other groups.
at::Tensor pack_grouped(
    const at::Tensor& numbers, const at::Tensor& scales, const std::optional<at::Tensor>& minimums, int64_t bits,
    const std::optional<at::Tensor>& units);

// Packs a weight matrix for w8a8.h. weight is [outputs, inputs] in int8. scales is [outputs, groups] in float32. A
// group has 64 inputs; the last group of an output may have fewer inputs. The result is [panels, groups, bytes of a
// group].
at::Tensor pack_w8a8(const at::Tensor& weight, const at::Tensor& scales);

// Reads the weights of some outputs from a packed weight matrix. packed is a result of `pack`, `pack_grouped` or
// `pack_w8a8`. rows contains the outputs to read, as [rows] in int64. The result is [rows, inputs] in float32.
at::Tensor packed_rows(const at::Tensor& packed, const at::Tensor& rows, int64_t outputs, int64_t inputs);

// Multiplies x by a packed weight matrix. x is [rows, inputs]. x has the type of the weights if they are float32 or
// float16; for all other weights, x is bf16. packed is a result of `pack`, `pack_int8`, `pack_grouped` or `pack_w8a8`.
// wide says whether the result is float32.
at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, bool wide);

}  // namespace pagewire
