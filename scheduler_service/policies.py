"""Creates the waiting queue of a scheduling policy, by the policy's name.

Other packages add policies as entry points of the group `pagewire.policies`. Each names a subclass of `WaitingQueue`
that is called without arguments. A short trial at the start refuses a class that loses or repeats requests.
"""

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points

from scheduler_service.core import FairQueue, PriorityQueue, SamplingParams, SequenceGroup, WaitingQueue

GROUP = "pagewire.policies"
POLICIES: dict[str, type[WaitingQueue]] = {"fcfs": WaitingQueue, "priority": PriorityQueue, "fair": FairQueue}
"""The policies of this package."""


def waiting_queue(policy: str, overtakes: int = 64, tenant_weights: Mapping[str, float] | None = None) -> WaitingQueue:
    """Raises ValueError if no policy has this name, or its class cannot be used."""
    match policy:
        case "priority":
            return PriorityQueue(overtakes)
        case "fair":
            return FairQueue(tenant_weights)
    return policy_class(policy)()


@lru_cache(maxsize=8)
def policy_class(name: str) -> type[WaitingQueue]:
    """Raises ValueError if no policy has this name, or its class cannot be used."""
    if name in POLICIES:
        return POLICIES[name]
    found = {one.name: one for one in entry_points(group=GROUP)}
    if name not in found:
        raise ValueError(f"{name!r} is no policy; there are {', '.join([*POLICIES, *sorted(found)])}")
    source = f"the policy {name!r} is {found[name].value}, which"
    try:
        one = found[name].load()
    except Exception as error:
        raise ValueError(f"{source} cannot be imported: {error!r}") from error
    if not (isinstance(one, type) and issubclass(one, WaitingQueue)):
        raise ValueError(f"{source} is no subclass of scheduler_service.core.WaitingQueue")
    try:
        fault = find_fault(one)
    except Exception as error:
        raise ValueError(f"{source} failed in a trial: {error!r}") from error
    if fault:
        raise ValueError(f"{source} {fault}")
    return one


def checked_policy(name: str) -> str:
    """The name of a policy that can be used. Raises ValueError for any other."""
    policy_class(name)
    return name


def find_fault(queue_class: type[WaitingQueue]) -> str:
    """Try each method that the scheduler calls. Returns the end of a sentence, empty for a good queue."""
    queue = queue_class()
    groups = [
        SequenceGroup(str(number), range(1), SamplingParams(max_tokens=1), priority=-number, tenant=str(number % 2))
        for number in range(5)
    ]

    def fault(waiting: list[SequenceGroup]) -> str:
        """The difference to a queue of these groups."""
        upcoming = queue.upcoming(len(groups), equals=False)
        if len(queue) != len(waiting) or {*queue} != {*waiting} or any(one.request_id not in queue for one in waiting):
            return "loses or invents requests in len, iteration or `in`"
        if len(upcoming) != len(waiting) or {*upcoming} != {*waiting}:
            return "does not return every waiting request once from upcoming"
        if waiting and (queue.head is not upcoming[0] or queue.upcoming(1) != upcoming[:1]):
            return "has another head than the first request of upcoming"
        return ""

    waiting: list[SequenceGroup] = []
    for group in groups:
        queue.append(group)
        waiting.append(group)
        if found := fault(waiting):
            return f"{found} after append"
    running: dict[SequenceGroup, None] = {}
    for _ in range(3):  # admitted, as the planner does
        head = queue.head
        queue.remove(head.request_id)
        waiting.remove(head)
        queue.charge(head, 1, 1)
        running[head] = None
        if found := fault(waiting):
            return f"{found} after remove"
    victim = queue.victim(running)
    if victim not in running:
        return "returns a victim that does not run"
    if not isinstance(queue.outranks(queue.head, victim), bool) or not isinstance(queue.lane(victim), str):
        return "must return a bool from outranks, and a str from lane"
    queue.put_back([victim])
    waiting.append(victim)
    if found := fault(waiting):
        return f"{found} after put_back"
    for group in groups:
        queue.end(group.request_id)
    if found := fault([]):
        return f"{found} after end"
    if queue.live:
        return "keeps the ids of ended requests in live: append and end must call super()"
    return ""
