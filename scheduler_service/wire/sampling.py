"""A request's sampling parameters between front end and worker."""

from dataclasses import dataclass

from pagewire_common.sampling import SamplerParams
from scheduler_service.core import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestSampling(SamplingParams, SamplerParams):
    """The core's parameters, and the numbers for the worker's sampler."""
