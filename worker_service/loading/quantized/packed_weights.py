"""Reads checkpoints with quantised linear layers: GPTQ, AWQ, compressed-tensors and fp8. Integers of 4 or 8 bits become
a `GroupedWeight`, from gptqmodel, autoawq ("gemm") and compressed-tensors ("pack-quantized", "int-quantized"). 8-bit
floats become a `Float8Weight`."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import float8
from kernels.float8 import Float8Weight
from kernels.linear import mx_float4
from kernels.ops import GroupedWeight, MxFloat4Weight, QuantizedWeight
from pagewire_common.start_error import StartError
from worker_service.loading.files.tensor_names import spellings
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.quantized import float8_weights
from worker_service.loading.quantized.compressed_groups import Block
from worker_service.loading.quantized.float8_stacks import Float8Stacks
from worker_service.loading.quantized.quantization_config import QuantizationConfig
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.wording import named, shown

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Positions of eight neighbouring outputs in a 32-bit word of AWQ."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""Words in which each packed number is 1, by bits of a number."""


_INPUT_SCALES = ("input_scale", "activation_scale")
"""Names of a layer's input scale; the second is from transformers."""


_TENSORS = (
    "qweight", "qzeros", "scales", "g_idx",
    "weight", "weight_packed", "weight_shape", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx",
    *_INPUT_SCALES, "input_zero_point",
)  # fmt: skip
"""Tensors of a quantised layer. With integer weights, inputs are not quantised and their scales are unused."""


class PackedWeights(Mapping[str, QuantizedWeight]):
    """Quantised weights by their names in an unquantised checkpoint."""

    share = 5 / 8
    """Maximum bytes of a weight, as a share of 16 bits: at most two 16-bit scales for 16 numbers of 8 bits."""

    def __init__(self, files: WeightFiles, config: Mapping[str, Any], *, has_stacks: bool = False) -> None:
        """config: the quantization_config; has_stacks: whether experts in fp8 are in stacks. Raises StartError if
        unsupported."""
        self._files = files
        try:
            self.config = QuantizationConfig.from_json(config)
        except ValueError as error:
            raise StartError(f"config.json: quantization_config: {error}") from error
        readers: dict[str, Callable[[str], QuantizedWeight]] = {
            "gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed, "fp8": self._float8
        }  # fmt: skip
        self._read = readers[self.config.layout]
        self._stacks = Float8Stacks(files, self.config) if has_stacks and self.config.layout == "fp8" else None

    @property
    def _parts(self) -> Collection[tuple[str, str]]:
        """Ends of names, and types, of tensors with quantised weights."""
        in_floats = ("weight", "F8_E4M3")
        if self.config.layout == "compressed-tensors":
            return ("weight_packed", "I32"), ("weight", "I8"), in_floats
        return [in_floats if self.config.layout == "fp8" else ("qweight", "I32")]

    @property
    def schemes(self) -> set[Literal["fp8", "gguf"]]:
        """Schemes of `Linear` for these weights."""
        found: set[Literal["fp8", "gguf"]] = {
            "fp8" if self._files.dtypes.get(name) == "F8_E4M3" else "gguf" for name in self._matrices()
        }
        return found | {"fp8"} if self._stacks else found

    @property
    def block(self) -> Block | None:
        """See `QuantizationConfig`."""
        return self.config.block

    @property
    def stores_input_scales(self) -> bool:
        in_files = any(name.endswith(_INPUT_SCALES) for name in self._files.dtypes)
        return "fp8" in self.schemes and (in_files or self.config.stores_input_scales)

    def __iter__(self) -> Iterator[str]:
        yield from self._matrices()
        yield from self._stacks or ()

    def _matrices(self) -> Iterator[str]:
        for name, found in self._files.dtypes.items():
            layer, _, part = name.rpartition(".")
            if (part, found) in self._parts:
                yield f"{layer}.weight"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return self._stored_name(str(name)) is not None or (self._stacks is not None and name in self._stacks)

    def _stored_name(self, name: str) -> str | None:
        """The name of a quantised weight in the files, or None. See `spellings`."""
        for one in spellings(name):
            layer, _, part = one.rpartition(".")
            if part == "weight" and any(self._files.dtypes.get(f"{layer}.{p}") == t for p, t in self._parts):
                return one
        return None

    def __getitem__(self, name: str) -> QuantizedWeight:
        """Raises KeyError for an unquantised weight, and StartError for invalid tensors."""
        stored = self._stored_name(name)
        try:
            if stored is None and self._stacks is not None:
                return self._stacks[name]
            if stored is None:
                raise KeyError(name)
            return self._read(stored.removesuffix("weight"))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:  # shapes in the file may be wrong
            raise StartError(f"the quantised weight {named(name)} cannot be read: {error}") from error

    def check_scales(self) -> None:
        """Refuse scales outside quantised layers, such as AWQ's scales of activations."""
        for name in self._files.dtypes if ("qweight", "I32") in self._parts else ():
            layer = name.removesuffix("scales")
            if name.endswith(".scales") and not self._has(layer, "qweight"):
                raise StartError(f"{named(name)} is a scale, but not of a quantised layer, which is not supported")

    def tensors_of(self, name: str) -> list[str]:
        """Names of the tensors that store a quantised weight."""
        if self._stacks is not None and name in self._stacks:
            return self._stacks.tensors_of(name)
        layer = (self._stored_name(name) or name).removesuffix("weight")
        return [layer + part for part in _TENSORS if self._has(layer, part)]

    # ---- layouts: numbers [outputs, inputs], scales and zeros [outputs, groups]

    def _gptq(self, layer: str) -> GroupedWeight:
        bits = self.config.bits
        words, scales = self._matrix(layer, "qweight"), self._matrix(layer, "scales")
        if self.config.is_ordered:
            self._tensor(layer, "g_idx")  # raises ValueError without g_idx
        if self.config.layers_differ and self._has(layer, "g_idx"):
            bits = 8 if len(words) * 4 == len(self._tensor(layer, "g_idx")) else 4
        numbers = _unpacked(words, bits).permute(1, 0, 2).flatten(1)  # a word packs the numbers of neighbouring inputs
        zeros = self._matrix(layer, "qzeros")
        if self.config.stores_one_less:
            zeros = zeros + _ONES[bits]  # carries into the next number, as in gptqmodel
        self._check_groups(numbers.shape[1], len(scales))
        weight = _grouped(numbers, scales.T, _unpacked(zeros, bits).flatten(1).T, bits)
        return self._in_order(weight, layer, "g_idx", len(scales))

    def _awq(self, layer: str) -> GroupedWeight:
        words, zeros, scales = (self._matrix(layer, part) for part in ("qweight", "qzeros", "scales"))
        numbers = _unpacked(words, 4)[:, :, _AWQ_PLACES].flatten(1)  # a word packs the numbers of neighbouring outputs
        self._check_groups(len(numbers), len(scales))
        return _grouped(numbers.T, scales.T, _unpacked(zeros, 4)[:, :, _AWQ_PLACES].flatten(1).T, 4)

    def _compressed(self, layer: str) -> QuantizedWeight:
        if self._files.dtypes.get(f"{layer}weight") == "F8_E4M3":
            return self._float8(layer)
        scales, zeros = self._tensor(layer, "weight_scale"), None
        if not self._has(layer, "weight_packed"):
            numbers, bits = self._matrix(layer, "weight").view(torch.uint8) ^ 128, 8  # int8 plus 128
            if self._has(layer, "weight_zero_point"):
                zeros = _of_outputs(self._tensor(layer, "weight_zero_point").int() + 128, len(numbers))
        else:
            words, shape = self._matrix(layer, "weight_packed"), self._tensor(layer, "weight_shape").tolist()
            outputs, inputs = shape if len(shape) == 2 else (0, 0)
            bits = 4 if words.shape == (outputs, -(-inputs // 8)) else 8
            if words.shape != (outputs, -(-inputs * bits // 32)):
                raise ValueError(f"{list(words.shape)} words do not hold {shown(shape)} numbers of 4 or 8 bits")
            numbers = _unpacked(words, bits).flatten(1)[:, :inputs]
            if self._has(layer, "weight_zero_point"):
                zeros = self._matrix(layer, "weight_zero_point")
                if zeros.dtype is torch.int8:
                    zeros = zeros.int() + (1 << bits - 1)
                elif len(zeros) != -(-outputs * bits // 32):
                    raise ValueError(f"{list(zeros.shape)} words do not hold zero points of {outputs} outputs")
                else:  # a word has zero points of neighbouring outputs
                    zeros = _unpacked(zeros.T, bits).flatten(1)[:, :outputs].T
        scales = _of_outputs(scales, len(numbers))
        if self.config.groups and not any(
            group.fits(bits, numbers.shape[1], scales.shape[1], has_zeros=zeros is not None)
            for group in self.config.groups
        ):
            raise ValueError(
                f"{bits} bits and {scales.shape[1]} scales for the {numbers.shape[1]} inputs of an output, "
                f"{'without' if zeros is None else 'with'} zero points, match no group of config_groups"
            )
        weight = _grouped(numbers, scales, torch.tensor(1 << bits - 1) if zeros is None else zeros, bits)
        return self._in_order(weight, layer, "weight_g_idx", scales.shape[1])

    def _float8(self, layer: str) -> Float8Weight:
        of_inputs = next((part for part in _INPUT_SCALES if self._has(layer, part)), None)
        if of_inputs is None and self.config.stores_input_scales:
            of_inputs = _INPUT_SCALES[0]
        input_scale = None if of_inputs is None else self._tensor(layer, of_inputs)
        # transformers multiplies by `weight_scale_inv`, despite the name.
        name = "weight_scale_inv" if self._has(layer, "weight_scale_inv") else "weight_scale"
        if self._has(layer, "weight_zero_point") and self._tensor(layer, "weight_zero_point").float().any():
            raise ValueError("zero points of floats are not read")
        numbers, scales, block = self._matrix(layer, "weight"), self._tensor(layer, name), self.config.block
        return float8_weights.float8_weight(numbers, scales, input_scale, block)

    # ---- tensors

    def _has(self, layer: str, part: str) -> bool:
        return layer + part in self._files.dtypes

    def _tensor(self, layer: str, part: str) -> Tensor:
        if not self._has(layer, part):
            raise ValueError(f"there is no {layer}{part}")
        return self._files.read(layer + part)

    def _matrix(self, layer: str, part: str) -> Tensor:
        if (found := self._tensor(layer, part)).dim() != 2:
            raise ValueError(f"{part} has the shape {list(found.shape)}")
        return found

    def _check_groups(self, inputs: int, groups: int) -> None:
        """Raise ValueError if the number of groups contradicts config.json. Group size -1: one group."""
        size = self.config.group_size
        if size is not None and size * groups != inputs and not (groups == 1 and not 0 < size < inputs):
            raise ValueError(f"{groups} groups of {inputs} inputs are not of {size}")

    def _in_order(self, weight: GroupedWeight, layer: str, part: str, groups: int) -> GroupedWeight:
        """Make the inputs of each group neighbours. With GPTQ's `desc_act`, the tensor `part` contains the group of
        each input."""
        if not self._has(layer, part):
            return weight
        group_of, inputs = self._tensor(layer, part).long(), weight.numbers.shape[1]
        if group_of.shape != (inputs,):
            raise ValueError(f"{part} has the shape {list(group_of.shape)} where there are {inputs} inputs")
        together = torch.arange(inputs) // -(-inputs // groups)
        if group_of.equal(together) or (group_of < 0).all():  # negative: inputs are in order
            return weight
        order = group_of.argsort(stable=True)
        if not group_of[order].equal(together):
            raise ValueError(f"{part} does not assign the {inputs} inputs to {groups} groups of equal size")
        return weight._replace(numbers=weight.numbers[:, order].contiguous(), order=order)


class PackedFiles:
    """Dequantises the weights of a quantised checkpoint, for networks with floating-point weights."""

    def __init__(self, files: WeightFiles, packed: PackedWeights) -> None:
        self._files = files
        self._packed = packed

    def identity(self) -> Iterator[tuple[str, bytes]]:
        return self._files.identity()

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """See `Weights.check`. Quantised weights are checked by `load_into` only."""
        self._packed.check_scales()
        self._files.check({name: place for name, place in expected.items() if name not in self._packed}, cuts)

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        parts = [part for name in taken if name in self._packed for part in self._packed.tensors_of(name)]
        self._files.check_none_left({*taken, *parts}, ignored)

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        """See `Weights.own`. A quantised tied tensor always counts as separate."""
        packed = frozenset(name for name in tied if name in self._packed)
        return packed | self._files.own(tied)

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        self.check(places, cuts)
        self._files.load_into({name: place for name, place in places.items() if name not in self._packed}, cuts)
        for name, place in places.items():
            if name in self._packed:
                weight = self._packed[name]
                if weight.numbers.shape != place.shape:
                    shape = list(weight.numbers.shape)
                    raise StartError(f"weight {name} is {shape} where config.json asks for {list(place.shape)}")
                place.copy_(widened(weight))


def widened(weight: QuantizedWeight) -> Tensor:
    """Dequantise to [outputs, inputs] float32."""
    if isinstance(weight, Float8Weight):
        return float8.widened(weight)
    if isinstance(weight, MxFloat4Weight):
        return mx_float4.widened(weight)
    inputs = weight.numbers.shape[1]
    each = 32 if weight.scales.shape[1] == -(-inputs // 32) else 16

    def of_each(part: Tensor) -> Tensor:
        return part.repeat_interleave(each, dim=1)[:, :inputs]

    scales, minimums = weight.scales.float(), None if weight.minimums is None else weight.minimums.float()
    if weight.units is not None:
        units = weight.units.float().repeat_interleave(256 // each, dim=1)
        scales = scales * units[:, :, 0]
        minimums = None if minimums is None else minimums * units[:, :, 1]
    if minimums is None:
        found = (weight.numbers.float() - (1 << weight.bits - 1)) * of_each(scales)
    else:
        found = weight.numbers * of_each(scales) - of_each(minimums)
    return found if weight.order is None else torch.empty_like(found).index_copy_(1, weight.order, found)


def _of_outputs(part: Tensor, outputs: int) -> Tensor:
    """Expand one number, or [outputs], to [outputs, groups]."""
    part = part.reshape(-1, 1) if part.dim() < 2 else part
    return part.expand(outputs, -1) if len(part) == 1 else part


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack [rows, columns] int32 to [rows, columns, numbers] uint8, lowest bits first."""
    if words.dtype is not torch.int32:
        raise ValueError(f"{list(words.shape)} {words.dtype} are no words of packed numbers")
    whole = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(*words.shape, 4)
    return whole if bits == 8 else torch.stack((whole & 15, whole >> 4), dim=-1).flatten(2)


def _grouped(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> GroupedWeight:
    """Values are `(number - zero) * scale`. numbers: [outputs, inputs] uint8; scales, zeros: [outputs, groups]; one
    zero may serve all."""
    (outputs, inputs), groups = numbers.shape, scales.shape[-1]
    if scales.dim() != 2 or len(scales) != outputs or (zeros.dim() and zeros.shape != scales.shape) or not groups:
        raise ValueError(
            f"{list(scales.shape)} scales and {list(zeros.shape)} zeros do not fit weights of {list(numbers.shape)}"
        )
    size = inputs // groups
    if inputs % groups or not (groups == 1 or size % 32 == 0 or size == 16):
        raise ValueError(f"groups of {inputs / groups:g} inputs are not read; they must be 16, or a multiple of 32")
    fine = size == 16 and groups > 1
    repeats = 1 if fine else -(-size // 32)
    scales = scales.half().float()  # rounded before `minimums`, so that the zero point stays exact
    minimums = None if not fine and bool((zeros == 1 << bits - 1).all()) else zeros * scales

    def of_blocks(part: Tensor) -> Tensor:
        found = part.half().repeat_interleave(repeats, dim=1).contiguous()
        if not found.isfinite().all():
            raise ValueError("a scale is not finite in float16")
        return found

    return GroupedWeight(
        numbers.contiguous(),
        of_blocks(scales),
        None if minimums is None else of_blocks(minimums),
        8 if fine else bits,  # no kernel has groups of 16 in 4 bits
    )
