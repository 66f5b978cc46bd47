"""Creates the waiting queue of a policy, by the policy's name."""

from collections.abc import Mapping

from scheduler_service.core import FairQueue, PriorityQueue, WaitingQueue

POLICIES = ("fcfs", "priority", "fair")


def waiting_queue(policy: str, overtakes: int = 64, tenant_weights: Mapping[str, float] | None = None) -> WaitingQueue:
    """Raises ValueError if no policy has this name."""
    match policy:
        case "fcfs":
            return WaitingQueue()
        case "priority":
            return PriorityQueue(overtakes)
        case "fair":
            return FairQueue(tenant_weights)
    raise ValueError(f"{policy!r} is no policy")
