"""A request's sampling parameters from its front end to its worker: those that the core plans by, and the others."""

from dataclasses import dataclass

from pagewire_common.sampling import SamplerParams
from scheduler_service.core import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestSampling(SamplingParams, SamplerParams):
    """`SamplingParams` for the core, which knows no more, with the numbers for the worker's sampler."""
