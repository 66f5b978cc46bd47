"""The operations of a sampler as Triton kernels: a function for each method of `kernels.sampling.ops.SamplingOps`.

No operation waits for the device. Edits of logits are sparse, so eager torch applies them
(`kernels.sampling.logit_edits`).
"""

from kernels.sampling.eager import keep
from kernels.triton.sampling.draw import draw
from kernels.triton.sampling.greedy import greedy
from kernels.triton.sampling.log_probabilities import log_probabilities

__all__ = ["draw", "greedy", "keep", "log_probabilities"]
