"""The defaults of sampling parameters that a request leaves out: from the model's generation_config.json, if valid.

The model's author wrote the file. A value that no request might set, such as a NaN or a text for a number, is ignored
with a warning: it must not keep a model from being served, nor end a step.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import structlog

log = structlog.get_logger()


class Bounds(NamedTuple):
    """The range of a value, in a request and in a model's file."""

    low: float
    high: float
    excludes_low: bool = False

    def hold(self, value: float) -> bool:
        """Whether the value lies in the range; NaN lies in none."""
        return math.isfinite(value) and self.low <= value <= self.high and not (self.excludes_low and value == self.low)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"in {'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"


BOUNDS = {
    "temperature": Bounds(0, 100),
    "top_k": Bounds(0, 2**31 - 1),
    "top_p": Bounds(0, 1, excludes_low=True),
    "min_p": Bounds(0, 1),
    "repetition_penalty": Bounds(0.01, 10),
    "max_new_tokens": Bounds(1, 2**31 - 1),
}
_WHOLE = ("top_k", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for fields that a request leaves out, read as the authors' own library reads them.

    Without do_sample, decoding is greedy whatever the other fields say.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "GenerationDefaults":
        values = {
            name: config[name] for name in BOUNDS if config.get(name) is not None and _is_sound(name, config[name])
        }
        do_sample = config.get("do_sample")
        if do_sample is not None and not isinstance(do_sample, bool):
            _warn("do_sample", do_sample, "true or false")
        return cls(**values | {"temperature": values.get("temperature", 1.0) if do_sample is True else 0.0})

    def sampling_params(self) -> dict[str, float]:
        """As vLLM's engine protocol names them."""
        values = asdict(self)
        max_tokens = values.pop("max_new_tokens")
        return values if max_tokens is None else values | {"max_tokens": max_tokens}


def _is_sound(name: str, value: object) -> bool:
    types = (int,) if name in _WHOLE else (int, float)
    if type(value) in types and BOUNDS[name].hold(value):  # type: ignore[arg-type]  # true and false are no numbers
        return True
    _warn(name, value, f"{'a whole number' if name in _WHOLE else 'a number'} {BOUNDS[name]}")
    return False


def _warn(name: str, value: object, expected: str) -> None:
    log.warning("the model's default is left out", name=name, value=repr(value)[:100], expected=expected)
