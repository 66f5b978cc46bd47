"""The time of a step on a simulated worker, and the worker's sizes."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scheduler_service.core import SchedulerOutput
from scheduler_service.core.config import LayerGroup
from scheduler_service.recording.step_work import StepWork

# Fields that may be 0; the others must be positive.
MAY_BE_ZERO = frozenset(
    (
        "step_us",
        "decode_token_us",
        "context_token_us",
        "image_token_us",
        "num_device_blocks",
        "num_host_blocks",
        "encoder_budget",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Microseconds of a step, by its `StepWork`, and a worker's sizes. An encoder has no blocks.

    The defaults are round numbers for a small model on a few CPU cores, not measurements.
    """

    step_us: float = 2_000.0
    prefill_token_us: float = 500.0
    decode_token_us: float = 1_500.0
    context_token_us: float = 0.5
    image_token_us: float = 1_000.0
    """Encoding an image, for each of its tokens in the prompt."""
    swap_bytes_per_second: float = 5e9
    block_bytes: int = 368_640
    block_size: int = 16
    num_device_blocks: int = 4_096
    num_host_blocks: int = 2_048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    image_tokens: int = 256
    """Tokens of each image of a trace."""
    encoder_cache_size: int = 16_384
    encoder_budget: int = 0
    images_attend_both_ways: bool = False
    layer_groups: tuple[LayerGroup, ...] = ()
    """The groups of layers, if there are several or any has a window or states. In the JSON file, pairs of a block's
    tokens and the window's; a third value true stands for chunks, and two zeros for states."""
    guesses: tuple[float, ...] = ()
    """Shares of decodes that verify at least one draft, at least two, and so on."""
    acceptance: tuple[float, ...] = ()
    """Acceptance rates of the first draft, of the second after an accepted first, and so on; as many as `guesses`."""

    def step_seconds(self, output: SchedulerOutput, num_drafts: int = 0) -> float:
        """Seconds of a step. Call this before planning the next step, which changes the sequences."""
        work = StepWork.of(output).with_drafts(num_drafts)
        compute_us = (
            self.step_us
            + self.prefill_token_us * work.prefill_tokens
            + self.decode_token_us * work.decode_tokens
            + self.context_token_us * work.context_tokens
            + self.image_token_us * work.encoded_tokens
        )
        return compute_us / 1e6 + work.swapped_blocks * self.block_bytes / self.swap_bytes_per_second

    @property
    def prefill_tokens_per_second(self) -> float:
        return 1e6 / self.prefill_token_us

    @classmethod
    def read(cls, path: Path) -> "CostModel":
        """Read a JSON object; missing fields keep their defaults. Raises ValueError."""
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from error
        known: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= set(known):
            raise ValueError(f"{path}: the fields of a cost model are {', '.join(known)}")
        groups = _layer_groups(path, values.pop("layer_groups", []))
        shares: dict[str, Any] = {name: _shares(path, name, values.pop(name, [])) for name in ("guesses", "acceptance")}
        if len(shares["guesses"]) != len(shares["acceptance"]):
            raise ValueError(f"{path}: guesses and acceptance have different lengths")
        for name, value in values.items():
            if known[name] is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"{path}: {name} is {value!r}; it must be true or false")
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
            if not is_number or (value == 0 and name not in MAY_BE_ZERO):
                least = "number of at least 0" if name in MAY_BE_ZERO else "positive number"
                raise ValueError(f"{path}: {name} is {value!r}; it must be a {least}")
        return cls(**{name: known[name](value) for name, value in values.items()}, layer_groups=groups, **shares)


def _layer_groups(path: Path, value: Any) -> tuple[LayerGroup, ...]:
    groups = []
    for pair in value if isinstance(value, list) else [value]:
        match pair:
            case [int(block_size), int(window)] if block_size > 0 <= window or (block_size, window) == (0, 0):
                groups.append(LayerGroup(block_size, window))
            case [int(block_size), int(window), bool(chunked)] if block_size > 0 < window:
                groups.append(LayerGroup(block_size, window, chunked))
            case _:
                raise ValueError(f"{path}: layer_groups is {value!r}; it must be a list of pairs of tokens")
    return tuple(groups)


def _shares(path: Path, name: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(type(share) in (int, float) and 0 <= share <= 1 for share in value):
        raise ValueError(f"{path}: {name} is {value!r}; it must be a list of numbers from 0 to 1")
    return tuple(map(float, value))
