"""A run's figures: latencies in seconds, throughput in output tokens per virtual second."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from scheduler_service.simulation.simulator import RequestTimes, Result

Key = TypeVar("Key", str, int)

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in PERCENTILES}


def ttft(requests: Sequence[RequestTimes]) -> dict[str, float]:
    return percentiles([request.ttft for request in requests])


def by_tenant(requests: Sequence[RequestTimes]) -> dict[str, list[RequestTimes]]:
    return _grouped(requests, lambda request: request.arrival.tenant)


def by_priority(requests: Sequence[RequestTimes]) -> dict[int, list[RequestTimes]]:
    return _grouped(requests, lambda request: request.arrival.priority)


def summarise(result: Result) -> dict[str, object]:
    """All figures that may differ between policies; tenants and priorities only if there are several."""
    requests = result.requests
    figures: dict[str, object] = {
        name: percentiles([getattr(request, name) for request in requests])
        for name in ("ttft", "tpot", "e2e", "queued")
    }
    if len(tenants := by_tenant(requests)) > 1:
        figures["ttft_by_tenant"] = {tenant: ttft(some) for tenant, some in tenants.items()}
        figures["service_gap_tokens"] = round(result.service_gap)
    if len(priorities := by_priority(requests)) > 1:
        figures["ttft_by_priority"] = {priority: ttft(some) for priority, some in priorities.items()}
    return figures | {
        "output_tokens_per_second": result.output_tokens_per_second,
        "utilisation": result.utilisation,
        "preemptions": {mode.value: count for mode, count in result.preemptions.items()},
        "cached_tokens": result.cached_tokens,
        "steps": result.num_steps,
        "virtual_seconds": result.seconds,
    }


def _grouped(requests: Sequence[RequestTimes], key: Callable[[RequestTimes], Key]) -> dict[Key, list[RequestTimes]]:
    groups: defaultdict[Key, list[RequestTimes]] = defaultdict(list)
    for request in requests:
        groups[key(request)].append(request)
    return {name: groups[name] for name in sorted(groups)}
