"""The GPU's backend for the operations of the sampler: implements `kernels.sampling.ops.SamplingOps` with Triton
kernels.

No operation makes the host wait for the device. Edits of logits are applied by eager torch, because they are sparse
(`kernels.sampling.logit_edits`).
"""

from kernels.sampling.eager import keep
from kernels.triton.sampling.draw import draw
from kernels.triton.sampling.greedy import greedy
from kernels.triton.sampling.log_probabilities import log_probabilities

__all__ = ["draw", "greedy", "keep", "log_probabilities"]
