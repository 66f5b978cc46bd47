#include "packing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <type_traits>

#include "checks.h"
#include "floats.h"
#include "grouped.h"
#include "matmul.h"
#include "mx_float4.h"
#include "team.h"
#include "w8a8.h"

namespace pagewire {
namespace {

using at::Tensor;

// If `pack_grouped` made `packed` for so many inputs, calls apply(blocks). Returns whether it did.
template <typename F>
bool with_blocks(const Tensor& packed, int64_t inputs, const F& apply) {
  return packed.scalar_type() == at::kByte && packed.dim() == 3 &&
         WeightBlocks::visit(
             [&](const auto& block) {
               return packed.size(1) * block.kGroups == groups_of(inputs) &&
                      packed.size(2) == static_cast<int64_t>(sizeof(block));
             },
             [&](auto kind) { apply(reinterpret_cast<const decltype(kind)*>(packed.const_data_ptr<uint8_t>())); });
}

bool has_blocks(const Tensor& packed, int64_t inputs) {
  return with_blocks(packed, inputs, [](const auto*) {});
}

static_assert(WeightBlocks::kOfItsSize<LongBlock> == 0);

// Whether `pack_w8a8` made `packed` for so many inputs.
bool has_long_blocks(const Tensor& packed, int64_t inputs) {
  return packed.scalar_type() == at::kByte && packed.dim() == 3 && packed.size(1) == long_groups_of(inputs) &&
         packed.size(2) == static_cast<int64_t>(sizeof(LongBlock));
}

constexpr int64_t kMx4Line = 64, kMx4Lines = sizeof(Mx4Block) / kMx4Line;

// Whether `pack_mx_float4` made `packed` for so many inputs. A fourth dimension tells its blocks from others' blocks.
bool has_mx4_blocks(const Tensor& packed, int64_t inputs) {
  return packed.scalar_type() == at::kByte && packed.dim() == 4 && packed.size(1) == mx4_blocks_of(inputs) &&
         packed.size(2) == kMx4Lines && packed.size(3) == kMx4Line;
}

// Whether `pack` made `packed` from bf16 for so many inputs.
bool has_pairs(const Tensor& packed, int64_t inputs) {
  return packed.scalar_type() == at::kBFloat16 && packed.dim() == 4 && packed.size(1) == inputs / 2;
}

// Whether `pack` made `packed` from float32 or float16 for so many inputs.
bool has_floats(const Tensor& packed, int64_t inputs) {
  return (packed.scalar_type() == at::kFloat || packed.scalar_type() == at::kHalf) && packed.dim() == 3 &&
         packed.size(1) == inputs;
}

template <typename T>
Tensor pack_floats(const Tensor& weight) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  auto packed = at::zeros({panels_of(outputs), inputs, kPanel}, weight.options());
  const auto source = weight.contiguous();
  const auto* from = source.const_data_ptr<T>();
  auto* to = packed.data_ptr<T>();
  parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin * kPanel; output < std::min(outputs, end * kPanel); ++output)
      for (int64_t input = 0; input < inputs; ++input)
        to[(output / kPanel * inputs + input) * kPanel + output % kPanel] = from[output * inputs + input];
  });
  return packed;
}

template <typename T>
Tensor linear_of_floats(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs, bool wide) {
  const auto numbers = x.to(at::kFloat);
  const Sizes sizes{x.size(0), x.size(1), outputs, numbers.stride(0)};
  auto out = at::empty({sizes.rows, outputs}, wide ? numbers.options() : x.options());
  const auto multiply_to = [&](auto* results) {
    multiply_floats(
        packed.const_data_ptr<T>(), numbers.const_data_ptr<float>(), sizes,
        bias.has_value() ? bias->const_data_ptr<T>() : nullptr, results);
  };
  if (wide) {
    multiply_to(out.data_ptr<float>());
  } else {
    multiply_to(out.data_ptr<T>());
  }
  return out;
}

}  // namespace

bool can_pack(int64_t inputs) { return inputs % 2 == 0; }

bool can_pack_int8(int64_t inputs) {
#if defined(__AVX512BF16__)
  return can_pack(inputs);
#else
  return false;
#endif
}

Tensor pack(const Tensor& weight) {
  const auto type = weight.scalar_type();
  TORCH_CHECK(weight.device().is_cpu() && weight.dim() == 2 && can_pack(weight.size(1)) &&
                  (type == at::kBFloat16 || type == at::kFloat || type == at::kHalf),
              "this weight cannot be packed");
  if (type == at::kFloat) return pack_floats<float>(weight);
  if (type == at::kHalf) return pack_floats<at::Half>(weight);
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  auto packed = at::empty({panels_of(outputs), inputs / 2, kPanel, 2}, weight.options());
  const auto source = weight.contiguous();
  const auto* from = source.const_data_ptr<at::BFloat16>();
  auto* to = packed.data_ptr<at::BFloat16>();
  parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t input = 0; input < inputs; ++input)
        for (int64_t i = 0; i < kPanel; ++i) {
          const int64_t output = panel * kPanel + i;
          to[((panel * (inputs / 2) + input / 2) * kPanel + i) * 2 + input % 2] =
              output < outputs ? from[output * inputs + input] : at::BFloat16(0);
        }
  });
  return packed;
}

Tensor pack_int8(const Tensor& weight, const Tensor& scales) {
  TORCH_CHECK(weight.device().is_cpu() && weight.dim() == 2 && can_pack_int8(weight.size(1)) &&
                  weight.scalar_type() == at::kChar,
              "this weight cannot be packed");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), groups = groups_of(inputs);
  TORCH_CHECK(scales.device().is_cpu() && scales.scalar_type() == at::kBFloat16 && scales.dim() == 2 &&
                  scales.size(0) == outputs && scales.size(1) == groups,
              "scales must be bf16 [", outputs, ", ", groups, "]");
  auto packed = at::zeros({panels_of(outputs), groups, static_cast<int64_t>(sizeof(Int8Group))}, weight.options());
  const auto numbers = weight.contiguous(), factors = scales.contiguous();
  const auto* from = numbers.const_data_ptr<int8_t>();
  const auto* from_scales = factors.const_data_ptr<at::BFloat16>();
  auto* to = reinterpret_cast<Int8Group*>(packed.data_ptr<int8_t>());
  parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin * kPanel; output < std::min(outputs, end * kPanel); ++output) {
      const int64_t place = output % kPanel;
      Int8Group* own = to + output / kPanel * groups;
      for (int64_t group = 0; group < groups; ++group) own[group].scales[place] = from_scales[output * groups + group];
      for (int64_t input = 0; input < inputs; ++input)
        own[input / kGroup].weights[input % kGroup / 2][place][input % 2] = from[output * inputs + input];
    }
  });
  return packed;
}

Tensor pack_grouped(
    const Tensor& numbers, const Tensor& scales, const std::optional<Tensor>& minimums, int64_t bits,
    const std::optional<Tensor>& units) {
  TORCH_CHECK(numbers.device().is_cpu() && numbers.dim() == 2 && can_pack(numbers.size(1)) &&
                  numbers.scalar_type() == at::kByte && scales.dim() == 2,
              "this weight cannot be packed");
  const int64_t outputs = numbers.size(0), inputs = numbers.size(1);
  const int64_t groups = scales.size(1), shared = groups == groups_of(inputs) ? kGroup : kGroup / 2;
  TORCH_CHECK(groups == (inputs + shared - 1) / shared, "there are ", groups, " groups of ", inputs, " inputs");
  check_contiguous(numbers, "numbers");
  const auto* from = numbers.const_data_ptr<uint8_t>();
  Tensor packed;
  const auto is = [&](const auto& block) {
    return bits == block.kBits && shared == block.kShared && minimums.has_value() != block.kSymmetric &&
           units.has_value() == block.kHasUnits;
  };
  const bool is_known = WeightBlocks::visit(is, [&](auto kind) {
    using Block = decltype(kind);
    using Factor = std::remove_all_extents_t<decltype(Block::Group::scales)>;
    constexpr int64_t kInputs = Block::kGroups * kGroup;
    TORCH_CHECK(!Block::kHasUnits || inputs % kInputs == 0, "units are of ", kInputs, " inputs, and there are ", inputs);
    constexpr auto kType = c10::CppTypeToScalarType<Factor>::value;
    check_numbers(scales, kType, outputs * groups, "scales");
    if (minimums.has_value()) check_numbers(*minimums, kType, outputs * groups, "minimums");
    const int64_t blocks = groups_of(inputs) / Block::kGroups;
    if (units.has_value()) check_numbers(*units, at::kHalf, outputs * blocks * Block::kUnits, "units");
    const auto* from_scales = scales.const_data_ptr<Factor>();
    const auto* from_minimums = minimums.has_value() ? minimums->const_data_ptr<Factor>() : nullptr;
    const auto* from_units = units.has_value() ? units->const_data_ptr<at::Half>() : nullptr;
    packed = at::zeros({panels_of(outputs), blocks, static_cast<int64_t>(sizeof(Block))}, numbers.options());
    auto* to = reinterpret_cast<Block*>(packed.data_ptr<uint8_t>());
    parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
      for (int64_t output = begin * kPanel; output < std::min(outputs, end * kPanel); ++output) {
        const int64_t place = output % kPanel;
        Block* own = to + output / kPanel * blocks;
        for (int64_t i = 0; i < groups; ++i) {
          constexpr int64_t kOfABlock = Block::kGroups * Block::kScales;
          auto& group = own[i / kOfABlock].groups[i % kOfABlock / Block::kScales];
          group.scales[i % Block::kScales][place] = from_scales[output * groups + i];
          if constexpr (!Block::kSymmetric)
            group.minimums[i % Block::kScales][place] = from_minimums[output * groups + i];
        }
        if constexpr (Block::kHasUnits)
          for (int64_t i = 0; i < blocks * Block::kUnits; ++i)
            own[i / Block::kUnits].units[i % Block::kUnits][place] = from_units[output * blocks * Block::kUnits + i];
        for (int64_t input = 0; input < inputs; ++input)
          own[input / kInputs].put(input % kInputs, place, from[output * inputs + input]);
      }
    });
  });
  TORCH_CHECK(is_known, "there are no products of weights with ", bits, " bits and a scale for ", shared, " inputs",
              minimums.has_value() ? ", with minimums" : "", units.has_value() ? ", with units" : "");
  return packed;
}

Tensor pack_w8a8(const Tensor& weight, const Tensor& scales) {
  TORCH_CHECK(weight.device().is_cpu() && weight.dim() == 2 && can_pack(weight.size(1)) &&
                  weight.scalar_type() == at::kChar,
              "this weight cannot be packed");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), groups = long_groups_of(inputs);
  check_contiguous(weight, "weight");
  check_numbers(scales, at::kFloat, outputs * groups, "scales");
  const auto bytes = weight.options().dtype(at::kByte);
  auto packed = at::zeros({panels_of(outputs), groups, static_cast<int64_t>(sizeof(LongBlock))}, bytes);
  const auto* from = weight.const_data_ptr<int8_t>();
  const auto* from_scales = scales.const_data_ptr<float>();
  auto* to = reinterpret_cast<LongBlock*>(packed.data_ptr<uint8_t>());
  parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin * kPanel; output < std::min(outputs, end * kPanel); ++output) {
      const int64_t place = output % kPanel;
      LongBlock* own = to + output / kPanel * groups;
      for (int64_t group = 0; group < groups; ++group) own[group].scales[place] = from_scales[output * groups + group];
      for (int64_t input = 0; input < inputs; ++input)
        own[input / kLongGroup].numbers[input % kLongGroup / 4][place][input % 4] =
            static_cast<uint8_t>(from[output * inputs + input] + 128);
    }
  });
  return packed;
}

Tensor pack_mx_float4(const Tensor& numbers, const Tensor& scales) {
  TORCH_CHECK(numbers.device().is_cpu() && numbers.dim() == 2 && numbers.size(1) % kGroup == 0 &&
                  numbers.scalar_type() == at::kByte,
              "this weight cannot be packed");
  const int64_t outputs = numbers.size(0), inputs = numbers.size(1), blocks = mx4_blocks_of(inputs);
  check_contiguous(numbers, "numbers");
  check_numbers(scales, at::kByte, outputs * groups_of(inputs), "scales");
  const auto* from = numbers.const_data_ptr<uint8_t>();
  const auto* from_scales = scales.const_data_ptr<uint8_t>();
  const auto* end_of_scales = from_scales + scales.numel();
  TORCH_CHECK(std::all_of(from_scales, end_of_scales, [](uint8_t scale) { return scale <= Mx4Block::kMaxScale; }),
              "a scale is above 2 to the power of ", Mx4Block::kMaxScale - 127);
  auto packed = at::zeros({panels_of(outputs), blocks, kMx4Lines, kMx4Line}, numbers.options());
  auto* to = reinterpret_cast<Mx4Block*>(packed.data_ptr<uint8_t>());
  parallel_for(panels_of(outputs), 1, [&](int64_t begin, int64_t end) {
    constexpr int64_t kInputs = kMx4Groups * kGroup;
    for (int64_t output = begin * kPanel; output < std::min(outputs, end * kPanel); ++output)
      for (int64_t input = 0; input < inputs; ++input)
        to[output / kPanel * blocks + input / kInputs].put(
            input % kInputs, output % kPanel, from[output * inputs + input],
            from_scales[(output * inputs + input) / kGroup]);
  });
  return packed;
}

Tensor packed_rows(const Tensor& packed, const Tensor& rows, int64_t outputs, int64_t inputs) {
  TORCH_CHECK(packed.dim() > 0 && packed.size(0) == panels_of(outputs) && can_pack(inputs) &&
                  (has_blocks(packed, inputs) || has_long_blocks(packed, inputs) || has_pairs(packed, inputs) ||
                   has_floats(packed, inputs)),
              "the weight was not packed for ", inputs, " inputs and ", outputs, " outputs");
  TORCH_CHECK(rows.dim() == 1, "rows must be [rows]");
  check_numbers(rows, at::kLong, rows.numel(), "rows");
  check_rows(rows, outputs);
  const auto* wanted = rows.const_data_ptr<int64_t>();
  auto found = at::empty({rows.numel(), inputs}, rows.options().dtype(at::kFloat));
  auto* to = found.data_ptr<float>();
  // Stores weight(input, panel, output's index in the panel) for each requested row and input.
  const auto read = [&](const auto& weight) {
    parallel_for(rows.numel(), rows_a_thread(inputs), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t input = 0; input < inputs; ++input)
          to[i * inputs + input] = weight(input, wanted[i] / kPanel, wanted[i] % kPanel);
    });
  };
  if (has_pairs(packed, inputs)) {
    const auto* from = packed.const_data_ptr<at::BFloat16>();
    read([&](int64_t input, int64_t panel, int64_t place) {
      return static_cast<float>(from[((panel * (inputs / 2) + input / 2) * kPanel + place) * 2 + input % 2]);
    });
  } else if (has_floats(packed, inputs)) {
    const auto read_from = [&](const auto* from) {
      read([&](int64_t input, int64_t panel, int64_t place) {
        return static_cast<float>(from[(panel * inputs + input) * kPanel + place]);
      });
    };
    if (packed.scalar_type() == at::kFloat) {
      read_from(packed.const_data_ptr<float>());
    } else {
      read_from(packed.const_data_ptr<at::Half>());
    }
  } else if (has_long_blocks(packed, inputs)) {
    const auto* blocks = reinterpret_cast<const LongBlock*>(packed.const_data_ptr<uint8_t>());
    read([&](int64_t input, int64_t panel, int64_t place) {
      return blocks[panel * packed.size(1) + input / kLongGroup].weight(input % kLongGroup, place);
    });
  } else {
    with_blocks(packed, inputs, [&](const auto* blocks) {
      constexpr int64_t kInputs = std::remove_pointer_t<decltype(blocks)>::kGroups * kGroup;
      read([&](int64_t input, int64_t panel, int64_t place) {
        return blocks[panel * packed.size(1) + input / kInputs].weight(input % kInputs, place);
      });
    });
  }
  return found;
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs, bool wide) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && can_pack(x.size(1)), "x must be [rows, inputs]");
  const int64_t inputs = x.size(1);
  const auto type = packed.scalar_type();
  const bool is_float = has_floats(packed, inputs);
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == (is_float ? type : at::kBFloat16), "x must be on the CPU and ",
              is_float ? type : at::kBFloat16);
  const bool is_int8 = type == at::kChar && packed.dim() == 3 && packed.size(1) == groups_of(inputs) &&
                       packed.size(2) == static_cast<int64_t>(sizeof(Int8Group));
  const bool is_w8a8 = has_long_blocks(packed, inputs), is_mx4 = has_mx4_blocks(packed, inputs);
  TORCH_CHECK(packed.dim() > 0 && packed.size(0) == panels_of(outputs) &&
                  (is_float || is_int8 || is_w8a8 || is_mx4 || has_blocks(packed, inputs) || has_pairs(packed, inputs)),
              "the weight was not packed for ", inputs, " inputs and ", outputs, " outputs");
  if (bias.has_value()) {
    check_like(*bias, x, "bias");
    check_contiguous(*bias, "bias");
    TORCH_CHECK(bias->numel() == outputs, "bias must be [outputs]");
  }
  if (is_float) {
    return type == at::kFloat ? linear_of_floats<float>(x, packed, bias, outputs, wide)
                              : linear_of_floats<at::Half>(x, packed, bias, outputs, wide);
  }
  auto out = at::empty({x.size(0), outputs}, x.options().dtype(wide ? at::kFloat : at::kBFloat16));
  const Results results{wide ? nullptr : out.data_ptr<at::BFloat16>(), wide ? out.data_ptr<float>() : nullptr};
  const auto* numbers = x.const_data_ptr<at::BFloat16>();
  const auto* added = bias.has_value() ? bias->const_data_ptr<at::BFloat16>() : nullptr;
  const Sizes sizes{x.size(0), inputs, outputs, x.stride(0)};
  if (type == at::kBFloat16) {
    multiply(Bf16Weights{packed.const_data_ptr<at::BFloat16>()}, numbers, sizes, added, results);
    return out;
  }
  if (is_mx4) {
    const auto* blocks = reinterpret_cast<const Mx4Block*>(packed.const_data_ptr<uint8_t>());
    multiply(Mx4Weights{blocks}, numbers, sizes, added, results);
    return out;
  }
  if (is_w8a8) {
    multiply_long(reinterpret_cast<const LongBlock*>(packed.const_data_ptr<uint8_t>()), numbers, sizes, added, results);
    return out;
  }
  if (type == at::kByte) {
    with_blocks(packed, inputs, [&](const auto* blocks) { multiply_grouped(blocks, numbers, sizes, added, results); });
    return out;
  }
#if defined(__AVX512BF16__)
  multiply(Int8Weights{reinterpret_cast<const Int8Group*>(packed.const_data_ptr<int8_t>())}, numbers, sizes, added, results);
#else
  TORCH_CHECK(false, "there are no products of int8 weights without bf16 dot products");
#endif
  return out;
}

}  // namespace pagewire
