"""The operations of a sampler on a CPU: the one that every step needs is compiled, the others are eager torch."""

from torch import Tensor

from kernels.cpu.ops import _library
from kernels.sampling import draw, log_probabilities

__all__ = ["draw", "greedy", "log_probabilities"]


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.sampling.greedy`."""
    token_ids, largest = _library.greedy(logits.contiguous())
    return token_ids, largest
