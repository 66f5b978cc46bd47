"""The GPU's backend of the sampler. No operation makes the host wait. Sparse edits of logits are eager torch
(`kernels.sampling.logit_edits`)."""

from kernels.sampling.eager import keep
from kernels.triton.sampling.draw import draw
from kernels.triton.sampling.greedy import greedy
from kernels.triton.sampling.log_probabilities import log_probabilities

__all__ = ["draw", "greedy", "keep", "log_probabilities"]
