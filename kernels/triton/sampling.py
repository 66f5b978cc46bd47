"""The operations of a sampler as Triton kernels: one function for each of `kernels.sampling_ops.SamplingOps`.

None waits for the device. Edits of logits are sparse and stay eager (`kernels.logit_edits`).
"""

from kernels.sampling import keep
from kernels.triton.draw import draw
from kernels.triton.greedy import greedy
from kernels.triton.log_probabilities import log_probabilities

__all__ = ["draw", "greedy", "keep", "log_probabilities"]
