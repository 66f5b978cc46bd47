"""Reads experts in fp8 that a checkpoint stores in stacks, as Mistral 4 does:

experts.NAME                   [experts, outputs, inputs] e4m3
experts.NAME_scale_inv         [experts, 1, 1], or with blocks [experts, blocks of outputs, blocks of inputs]
experts.NAME_activation_scale  [experts], if inputs have stored scales
"""

from collections.abc import Iterator, Mapping

from kernels.float8 import Float8Weight
from worker_service.loading.files.tensor_names import spellings
from worker_service.loading.files.weight_files import WeightFiles
from worker_service.loading.quantized.float8_weights import float8_weight
from worker_service.loading.quantized.quantization_config import QuantizationConfig
from worker_service.loading.quantized.stacked_experts import ExpertPart

_SCALES, _INPUT_SCALES = "_scale_inv", "_activation_scale"


class Float8Stacks(Mapping[str, Float8Weight]):
    """The experts' weights, by their names in a network."""

    def __init__(self, files: WeightFiles, config: QuantizationConfig) -> None:
        self._files, self._config = files, config

    def __iter__(self) -> Iterator[str]:
        for name, dtype in self._files.dtypes.items():
            experts, _, projection = name.rpartition(".")
            if dtype == "F8_E4M3" and experts.endswith(".experts"):
                for number in range(self._files.shape(name)[0]):
                    yield f"{experts}.{number}.{projection}.weight"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return self._part(str(name)) is not None

    def __getitem__(self, name: str) -> Float8Weight:
        """Raises KeyError for any other weight, and ValueError for invalid tensors."""
        if (part := self._part(name)) is None:
            raise KeyError(name)
        ends = ["", _SCALES]
        if self._config.stores_input_scales or f"{part.stack}{_INPUT_SCALES}" in self._files.dtypes:
            ends.append(_INPUT_SCALES)
        if missing := [end for end in ends if f"{part.stack}{end}" not in self._files.dtypes]:
            raise ValueError(f"there is no {part.stack}{missing[0]}")
        numbers, scales, *of_inputs = (self._files.read_row(f"{part.stack}{end}", part.number) for end in ends)
        return float8_weight(numbers, scales, of_inputs[0] if of_inputs else None, self._config.block)

    def tensors_of(self, name: str) -> list[str]:
        """Names of the tensors that store a weight."""
        part = self._part(name)
        assert part is not None
        return [f"{part.stack}{end}" for end in ("", _SCALES, _INPUT_SCALES)]

    def _part(self, name: str) -> ExpertPart | None:
        """An expert's part, with the stack's name in the files."""
        if (part := ExpertPart.of(name)) is None:
            return None
        stored = (one for one in spellings(part.stack) if self._files.dtypes.get(one) == "F8_E4M3")
        return next((part._replace(stack=stack) for stack in stored), None)
