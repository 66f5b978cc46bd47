"""A linear layer, whose weight is packed once for all forward passes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import ops_for
from kernels.float8 import Float8Weight, quantize_float8
from kernels.ops import GroupedWeight, LoraWeights, MxFloat4Weight, Ops, Product, QuantizedWeight, Table
from kernels.reference import wide_linear

Quantization = Literal["none", "fp8", "int8", "w8a8", "int4", "gguf"]
"""w8a8: weights and inputs in 8 bits. gguf: as quantised in the GGUF file."""
Quantized = Mapping[str, QuantizedWeight]
"""Weights that are quantised in a checkpoint, by name."""
NONE_QUANTIZED: Quantized = MappingProxyType({})


def packing(ops: Ops, quantization: Quantization) -> Callable[[Tensor, bool], Product | None]:
    """The kernels' function that packs a weight. With `gguf`, weights that the file does not quantise stay as they
    are."""
    if quantization == "fp8":
        return lambda weight, wide: ops.pack_float8(quantize_float8(weight), wide)
    return {
        "none": ops.pack, "int8": ops.pack_int8, "w8a8": ops.pack_w8a8, "int4": ops.pack_int4, "gguf": ops.pack
    }[quantization]  # fmt: skip


def can_pack(device: torch.device, dtype: torch.dtype, quantization: Quantization) -> bool:
    """Whether the kernels support the scheme for this dtype and device."""
    some = torch.ones(2, 2, dtype=dtype, device=device)
    scheme: Quantization = "int4" if quantization == "gguf" else quantization  # gguf uses int4's kernels
    return packing(ops_for(device), scheme)(some, False) is not None


def head_quantization(device: torch.device, dtype: torch.dtype, quantization: Quantization) -> Quantization:
    """The output head's scheme beside `quantization` for other weights. Not 4 bits: perplexity would rise by 5 %,
    against 0.2 % for all other weights. Not fp8, as in published checkpoints."""
    if quantization == "fp8":
        return "none"
    if quantization not in ("int4", "gguf"):
        return quantization
    return "int8" if can_pack(device, dtype, "int8") else "none"


class Linear:
    """`x @ weight.T + bias`. weight: [outputs, inputs]; bias: [outputs] or None.

        `wide`             whether results are in float32, and not rounded to the dtype of x.
        `adds_bias`        whether this rank adds the bias: only one of several ranks whose results are summed.
        `batch_invariant`  whether packed products are batch-invariant even if `ops` is not.
        `quantisable`      whether `pack` may quantise the weight.
        `device`           where a weight on the meta device will be allocated.
        `ops`              the kernels; default: the device's fastest.

    Before `pack` or `pack_parts`, the unpacked weight is multiplied.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        wide: bool = False,
        adds_bias: bool = True,
        batch_invariant: bool = False,
        quantisable: bool = True,
        device: torch.device | None = None,
        ops: Ops | None = None,
    ) -> None:
        self.weight = weight
        self._shape = weight.shape
        self._device = device or weight.device
        self.bias = bias
        self._wide = wide
        self._batch_invariant = batch_invariant
        self._quantisable = quantisable
        self._added = bias if adds_bias else None
        self._product: Product | None = None
        self._adapter: LoraWeights | None = None
        self._ops: Ops = ops or ops_for(self._device)

    @classmethod
    def allocate(
        cls,
        outputs: int,
        inputs: int,
        biased: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        wide: bool = False,
        adds_bias: bool = True,
        deferred: bool = False,
        ops: Ops | None = None,
    ) -> "Linear":
        """Allocate weight and bias unfilled. deferred: the weight stays on the meta device until `materialise`."""
        bias = torch.empty(outputs, dtype=dtype, device=device) if biased else None
        weight = torch.empty(outputs, inputs, dtype=dtype, device="meta" if deferred else device)
        return cls(weight, bias, wide=wide, adds_bias=adds_bias, device=device, ops=ops)

    def materialise(self, quantization: Quantization = "none") -> bool:  # noqa: ARG002 (`_Stacked` uses the argument)
        """Allocate the weight if it is on the meta device; returns whether it was. quantization: the later argument of
        `pack`."""
        if not self.weight.is_meta:
            return False
        self.weight = torch.empty_like(self.weight, device=self._device)
        return True

    def pack(self, quantization: Quantization = "none") -> None:
        """Pack the weight if products get faster, and free the original. Raises ValueError if it cannot be
        quantised."""
        scheme = quantization if self._quantisable else "none"
        pack = packing(self._ops, scheme)
        if self._batch_invariant and scheme in ("none", "gguf"):  # other schemes are always batch-invariant
            pack = self._ops.pack_batch_invariant
        self._product = pack(self.weight, self._wide)
        if self._product is not None:
            self.free()

    def pack_parts(self, parts: Sequence[QuantizedWeight | None], sizes: Sequence[int]) -> None:
        """Use weights quantised in the checkpoint, for consecutive parts of the outputs. parts: None for a part that
        stays unquantised; without None, the weight may be on the meta device. sizes: outputs of each part. Raises
        ValueError for a wrong shape, or without kernels."""
        ops = self._ops
        self.check_parts(parts, sizes)
        own = torch.split(self.weight, list(sizes))
        whole = joined(parts)
        if whole is not None:
            parts, own, sizes = [whole], (self.weight,), [len(self.weight)]
        products: list[Product] = []
        for place, part in zip(own, parts, strict=True):
            product = ops.pack(place, self._wide) if part is None else _product(ops, part, self._device, self._wide)
            if product is None and part is None:
                product = partial(_unpacked, place.clone(), self._wide)
            if product is None:
                raise ValueError("these kernels have no products of such weights")
            products.append(product)
        self._product = products[0] if len(products) == 1 else _beside(products, sizes)
        self.free()

    def check_parts(self, parts: Sequence[QuantizedWeight | None], sizes: Sequence[int]) -> None:
        """Raise ValueError for a wrong shape."""
        for size, part in zip(sizes, parts, strict=True):
            needed = [size, self._shape[1]]
            if part is not None and list(part.numbers.shape) != needed:
                raise ValueError(f"a weight is {list(part.numbers.shape)} where {needed} is needed")

    def free(self) -> None:
        self.weight = torch.empty(0, dtype=self.weight.dtype, device=self._device)

    @property
    def table(self) -> Table | None:
        """The packed weight if it can be read by rows."""
        return self._product if isinstance(self._product, Table) else None

    def allocate_adapters(self, parts: Sequence[int], num_slots: int, max_rank: int) -> LoraWeights:
        """Allocate zeros for `num_slots` adapters. parts: outputs of each fused projection."""
        _, inputs = self._shape
        zeros = partial(torch.zeros, device=self._device)
        self._adapter = LoraWeights(
            a=zeros(num_slots, len(parts), max_rank, inputs, dtype=self.weight.dtype),
            b=zeros(num_slots, max_rank, sum(parts), dtype=self.weight.dtype),
            ranks=zeros(num_slots, dtype=torch.int32),
            starts=(0, *accumulate(parts)),
        )
        return self._adapter

    def __call__(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """x: [rows, inputs]. Returns [rows, outputs], with bias and adapters added. adapter_slots: [rows] int32,
        negative without adapter; None if no row has an adapter."""
        if self._product is not None:
            product = self._product(x, self._added)
        else:
            product = _unpacked(self.weight, self._wide, x, self._added)
        if adapter_slots is not None:
            self.add_lora(product, x, adapter_slots)
        return product

    def add_lora(self, product: Tensor, x: Tensor, adapter_slots: Tensor) -> None:
        """Add the adapters' outputs for x to `product`, in place."""
        assert self._adapter is not None
        self._ops.add_lora(product, x, adapter_slots, self._adapter)

    def parts(self, names: dict[str, int]) -> dict[str, Tensor]:
        """Views of weight and bias by tensor name. names: consecutive parts, with outputs of each."""
        weights = dict(zip(names, torch.split(self.weight, list(names.values())), strict=True))
        tensors = {f"{name}.weight": weight for name, weight in weights.items()}
        if self.bias is not None:
            biases = dict(zip(names, torch.split(self.bias, list(names.values())), strict=True))
            tensors |= {f"{name}.bias": bias for name, bias in biases.items()}
        return tensors


def _unpacked(weight: Tensor, wide: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    return (wide_linear if wide else functional.linear)(x, weight, bias)


def joined(parts: Sequence[QuantizedWeight | None]) -> QuantizedWeight | None:
    """Concatenate fused projections, because one product is faster than several. None if a part is None or layouts
    differ."""
    if len(parts) == 1:
        return parts[0]
    in_floats = [part for part in parts if isinstance(part, Float8Weight)]
    if in_floats:
        kinds = {
            (part.scales.shape[1], None if part.input_scale is None else float(part.input_scale)) for part in in_floats
        }
        if len(in_floats) < len(parts) or len(kinds) > 1:
            return None
        weights, scales, input_scales = zip(*in_floats, strict=True)
        return Float8Weight(torch.cat(weights), torch.cat(scales), input_scales[0])
    known = [part for part in parts if isinstance(part, GroupedWeight)]
    layouts = {(part.bits, part.scales.shape[1], part.minimums is None, part.units is None) for part in known}
    if len(known) < len(parts) or len(layouts) > 1:
        return None
    numbers, scales, minimums, bits, units, orders = zip(*known, strict=True)
    first, *others = orders
    if any(order is not first and (order is None or first is None or not order.equal(first)) for order in others):
        return None

    def whole(part: Sequence[Tensor | None]) -> Tensor | None:
        return None if part[0] is None else torch.cat([one for one in part if one is not None])

    return GroupedWeight(torch.cat(numbers), torch.cat(scales), whole(minimums), bits[0], whole(units), first)


def _product(ops: Ops, weight: QuantizedWeight, device: torch.device, wide: bool) -> Product | None:
    if isinstance(weight, Float8Weight):
        numbers, scales, input_scale = weight
        of_inputs = None if input_scale is None else input_scale.to(device)
        return ops.pack_float8(Float8Weight(numbers.to(device), scales.to(device), of_inputs), wide)
    if isinstance(weight, MxFloat4Weight):
        return ops.pack_mx_float4(weight, wide)
    table = ops.pack_grouped(weight, wide)
    return table if table is None or weight.order is None else _Ordered(table, weight.order)


class _Ordered:
    """A packed weight with reordered columns. order: the input of each column."""

    def __init__(self, table: Table, order: Tensor) -> None:
        self._table, self._order = table, order

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._table(x.index_select(1, self._order), bias)

    def rows(self, numbers: Tensor) -> Tensor:
        found = self._table.rows(numbers)
        return torch.empty_like(found).index_copy_(1, self._order, found)


def _beside(products: Sequence[Product], sizes: Sequence[int]) -> Product:
    """Products whose outputs are concatenated."""

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(products) if bias is None else torch.split(bias, list(sizes))
        return torch.cat([one(x, own) for one, own in zip(products, biases, strict=True)], dim=1)

    return product
