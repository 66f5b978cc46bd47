"""A request's sampling parameters on the way from front end to worker: the core's parameters and the sampler's
numbers.
"""

from dataclasses import dataclass

from pagewire_common.sampling import SamplerParams
from scheduler_service.core import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestSampling(SamplingParams, SamplerParams):
    """`SamplingParams` for the core, and the numbers for the worker's sampler."""
