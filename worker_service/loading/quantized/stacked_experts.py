"""Reads experts that a checkpoint stores in stacks, one tensor for a projection of all experts of a layer.

gpt-oss and Llama 4: experts.NAME, [experts, inputs, outputs], with biases experts.NAME_bias, [experts, outputs].
Qwen3-VL: the same as published; [experts, outputs, inputs] if saved by transformers 5.
Gemma 4 and Mistral 4: experts.NAME, [experts, outputs, inputs].
Granite: NAME.weight, [experts, outputs, inputs], beside the router.

In MXFP4, two uint8 tensors store NAME: NAME_blocks, [experts, outputs, inputs / 32, 16], has two e2m1 numbers a byte,
the first in the lower bits; NAME_scales, [experts, outputs, inputs / 32], has exponents of two plus 127. Networks know
projections of single experts, such as experts.3.down_proj.weight, [outputs, inputs].
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernels.linear.mx_float4 import GROUP, NOT_A_NUMBER, widened
from kernels.ops import MxFloat4Weight, QuantizedWeight
from pagewire_common.start_error import StartError
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.quantized.quantization_keys import FLAG, TEXTS, check_keys
from worker_service.parallel.cut import UNCUT, Cut
from worker_service.wording import named

_TURNED = {"gpt_oss": True, "llama4": True, "llama4_text": True, "gemma4": False, "gemma4_text": False,
           "granitemoehybrid": False, "mistral4": False, "qwen3_vl_moe": None, "qwen3_vl_moe_text": None}  # fmt: skip
"""Whether stacks have an expert's inputs before its outputs, by the `model_type` of networks with stacks. None: some
checkpoints do, and the shapes show it."""
IN_FLOAT8 = ("mistral4",)
"""Families whose stacks in fp8 are read."""
METHOD = "mxfp4"
"""The `quant_method` of config.json."""
_KEYS = {"modules_to_not_convert": TEXTS, "dequantize": FLAG}
"""Keys of the quantization_config. The names of the tensors show which weights are in MXFP4."""
_GRANITES = ".block_sparse_moe.experts"
_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(weight|bias)")


def stacked_family(config: Mapping[str, Any]) -> str | None:
    """The `model_type` of the network of this config.json, or of its text network, if checkpoints have stacks."""
    inner = config.get("text_config")
    families = (config.get("model_type"), inner.get("model_type") if isinstance(inner, dict) else None)
    return next((family for family in families if isinstance(family, str) and family in _TURNED), None)


def is_turned(family: str | None) -> bool:
    """Whether published stacks have an expert's inputs before its outputs. family: see `stacked_family`."""
    return _TURNED.get(family or "", True) is not False


class ExpertPart(NamedTuple):
    """One expert's part of a stack."""

    stack: str
    number: int
    is_bias: bool

    @classmethod
    def of(cls, name: str) -> "ExpertPart | None":
        """None if the tensor is no expert's."""
        if (found := _NAME.fullmatch(name)) is None:
            return None
        experts, number, projection, kind = found.groups()
        if experts.endswith(_GRANITES):
            return cls(f"{experts.removesuffix('.experts')}.{projection}.{kind}", int(number), kind == "bias")
        return cls(f"{experts}.{projection}{'_bias' * (kind == 'bias')}", int(number), kind == "bias")


class MxFloat4Experts(Mapping[str, QuantizedWeight]):
    """The experts' weights in MXFP4, by their names in a network."""

    schemes: frozenset[Literal["fp8", "gguf"]] = frozenset({"gguf"})
    """See `PackedWeights.schemes`."""
    share = 17 / 64
    """See `PackedWeights.share`: 4 bits and a 32nd of a byte."""
    block = None
    stores_input_scales = False

    def __init__(self, files: WeightFiles) -> None:
        self._files = files

    def __iter__(self) -> Iterator[str]:
        for name, dtype in self._files.dtypes.items():
            if dtype == "U8" and name.endswith("_blocks"):
                experts, _, projection = name.removesuffix("_blocks").rpartition(".")
                for number in range(self._files.shape(name)[0]):
                    yield f"{experts}.{number}.{projection}.weight"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        part = ExpertPart.of(str(name))
        return part is not None and self.has(part.stack)

    def __getitem__(self, name: str) -> MxFloat4Weight:
        """Raises KeyError for a weight that is not in MXFP4, and StartError for invalid tensors."""
        part = ExpertPart.of(name)
        if part is None or not self.has(part.stack):
            raise KeyError(name)
        blocks, scales = (self._files.read_row(f"{part.stack}_{kind}", part.number) for kind in ("blocks", "scales"))
        if (scales == NOT_A_NUMBER).any():
            raise StartError(f"a scale in {named(f'{part.stack}_scales')} is not a number")
        return MxFloat4Weight(torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1), scales)

    def has(self, stack: str) -> bool:
        return self._files.dtypes.get(f"{stack}_blocks") == "U8"

    def check(self, stack: str, experts: int, outputs: int, inputs: int) -> None:
        """Raises StartError if the stack has another shape."""
        if inputs % GROUP:
            raise StartError(f"{named(stack)} of {inputs} inputs cannot be stored in groups of {GROUP} inputs")
        groups = [experts, outputs, inputs // GROUP]
        for kind, shape in (("blocks", [*groups, GROUP // 2]), ("scales", groups)):
            name = f"{stack}_{kind}"
            if self._files.dtypes.get(name) != "U8":
                raise StartError(f"the weights lack the tensor {named(name)} of U8")
            if list(self._files.shape(name)) != shape:
                found = list(self._files.shape(name))
                raise StartError(f"tensor {named(name)} is {found} where config.json asks for {shape}")


class StackedFiles:
    """Weights of a checkpoint with stacked experts, for networks with floating-point weights. See `Weights`."""

    def __init__(self, files: WeightFiles, config: Mapping[str, Any] | None, family: str | None) -> None:
        """config: the quantization_config, or None; family: see `stacked_family`. Raises StartError for an unknown
        key."""
        self._files, self._narrow, self._turned = files, MxFloat4Experts(files), _TURNED.get(family or "", True)
        try:
            check_keys("", config or {}, _KEYS)
        except ValueError as error:
            raise StartError(f"config.json: quantization_config: {error}") from error
        self.packed = None if config is None or config.get("dequantize") else self._narrow
        """The weights that may be multiplied as stored; None if there are none, or if config.json says `dequantize`."""

    def identity(self) -> Iterator[tuple[str, bytes]]:
        return self._files.identity()

    def check(self, expected: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        places: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        numbers: dict[str, int] = {}
        turned: set[str] = set()
        for name, place in expected.items():
            if (part := ExpertPart.of(name)) is None:
                places[name] = place
            else:
                shapes[part.stack] = tuple(cuts[name].shape if name in cuts else place.shape)
                numbers[part.stack] = max(numbers.get(part.stack, 0), part.number + 1)
                turned |= {part.stack} if self._is_turned(part) else set()
        for stack, shape in shapes.items():
            if self._narrow.has(stack):
                self._narrow.check(stack, numbers[stack], *shape)
            else:
                stored = tuple(reversed(shape)) if stack in turned else shape
                places[stack] = torch.empty((numbers[stack], *stored), device="meta")
        self._files.check(places, cuts)

    def check_none_left(self, taken: Collection[str], ignored: Collection[str] = ()) -> None:
        names: set[str] = set()
        for name in taken:
            part = ExpertPart.of(name)
            if part is not None and self._narrow.has(part.stack):
                names |= {f"{part.stack}_blocks", f"{part.stack}_scales"}
            else:
                names.add(name if part is None else part.stack)
        self._files.check_none_left(names, ignored)

    def own(self, tied: Mapping[str, str]) -> frozenset[str]:
        return self._files.own(tied)

    def load_into(self, places: Mapping[str, Tensor], cuts: Mapping[str, Cut] = UNCUT) -> None:
        """One expert at a time is read whole, and in MXFP4 widened to float32."""
        self.check(places, cuts)
        self._files.load_into({name: place for name, place in places.items() if ExpertPart.of(name) is None}, cuts)
        for name, place in places.items():
            if (part := ExpertPart.of(name)) is not None:
                whole = self._whole(name, part)
                place.copy_(cuts[name].of(whole) if name in cuts else whole)

    def _whole(self, name: str, part: ExpertPart) -> Tensor:
        if self._narrow.has(part.stack):
            return widened(self._narrow[name])
        stored = self._files.read_row(part.stack, part.number)
        return stored.T if self._is_turned(part) else stored

    def _is_turned(self, part: ExpertPart) -> bool:
        """Whether the stack has inputs before outputs. The shapes of a layer's two stacks show it together; one alone
        may be square."""
        if part.is_bias or self._turned is not None:
            return self._turned is True and not part.is_bias
        experts, _, _ = part.stack.rpartition(".")
        gate_up, down = (self._files.shape(f"{experts}.{name}") for name in ("gate_up_proj", "down_proj"))
        return not (len(gate_up) == len(down) == 3 and gate_up[1] == 2 * down[2] and gate_up[2] == down[1])
