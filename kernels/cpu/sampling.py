"""The sampler on a CPU: operations of every step in C++, others in eager torch."""

from torch import Tensor

from kernels.cpu.ops import _library
from kernels.sampling.eager import Draws
from kernels.sampling.log_probabilities import log_probabilities

__all__ = ["draw", "greedy", "keep", "log_probabilities"]


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    token_ids, largest = _library.greedy(logits.contiguous())
    return token_ids, largest


def keep(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    _library.keep(logits, rows, bits)


def draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    token_ids: Tensor = _library.draw(
        logits.contiguous(),
        largest.float(),
        draws.rows,
        draws.keys,
        draws.temperature,
        draws.min_p.log(),
        draws.top_k,
        draws.top_p,
    )
    return token_ids
