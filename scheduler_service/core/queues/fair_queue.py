"""Shares service among tenants by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024).

A tenant's counter is the service that the tenant received, divided by the tenant's weight. The tenant with the lowest
counter is next, and a tenant's requests are served first come, first served.

A returning tenant's counter is raised to the lowest counter of the waiting tenants, or to that of the tenant that
waited last. A tenant therefore saves up no service while it is idle.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.queues.waiting_queue import MAX_STALE, WaitingQueue, insert_by_rank

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
# Counters that are kept for tenants without waiting requests, because clients can invent tenants.
MAX_IDLE_TENANTS = 4096


class FairQueue(WaitingQueue):
    """A queue for each tenant, and a heap of tenants. Counters only grow, so stale heap entries are renewed at the
    top."""

    charges = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self._weights = {} if weights is None else weights  # callers may change them later
        self._tenants: dict[str, OrderedDict[str, SequenceGroup]] = {}
        self._heap: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()
        self.counters: dict[str, float] = {}
        self._last_tenant = ""  # of the last group that left the queue

    def append(self, group: SequenceGroup) -> None:
        super().append(group)
        self._queue_of(group.tenant)[group.request_id] = group

    def put_back(self, groups: SequenceOf[SequenceGroup]) -> None:
        for tenant in dict.fromkeys(group.tenant for group in reversed(groups)):
            queue = self._queue_of(tenant)
            returned = [group for group in groups if group.tenant == tenant]
            self._groups.update((group.request_id, group) for group in returned)
            insert_by_rank(queue, returned)
        self._note_arrivals(groups)

    @property
    def head(self) -> SequenceGroup:
        return next(iter(self._tenants[self._next_tenant()].values()))

    def lane(self, group: SequenceGroup) -> str:
        return group.tenant

    def upcoming(
        self,
        most: int,
        *,
        equals: bool = True,  # noqa: ARG002
        without: Collection[str] = (),
    ) -> list[SequenceGroup]:
        """The next groups, tenant by tenant, from the least served tenant on."""
        tenants: list[str] = []
        groups: list[SequenceGroup] = []
        while self._heap and len(groups) < most and len(tenants) < len(self._tenants):
            tenant = self._next_tenant()
            heapq.heappop(self._heap)
            tenants.append(tenant)
            if tenant not in without:
                groups.extend(itertools.islice(self._tenants[tenant].values(), most - len(groups)))
        for tenant in tenants:
            heapq.heappush(self._heap, (self.counters[tenant], tenant))
        return groups

    def remove(self, request_id: str) -> None:
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._last_tenant = group.tenant
            queue = self._tenants[group.tenant]
            del queue[request_id]
            if not queue:
                del self._tenants[group.tenant]  # its heap entry is skipped at the top

    def charge(self, group: SequenceGroup, num_prompt_tokens: int, num_output_tokens: int) -> None:
        cost = PROMPT_TOKEN_COST * num_prompt_tokens + OUTPUT_TOKEN_COST * num_output_tokens
        counter = self.counters.get(group.tenant, 0.0)
        self.counters[group.tenant] = counter + cost / self._weights.get(group.tenant, 1.0)

    def _queue_of(self, tenant: str) -> OrderedDict[str, SequenceGroup]:
        if tenant not in self._tenants:
            lowest = self.counters[self._next_tenant()] if self._tenants else self.counters.get(self._last_tenant, 0.0)
            if len(self.counters) >= MAX_IDLE_TENANTS + len(self._tenants):
                self._forget_idle_tenants(lowest)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), lowest)
            self._tenants[tenant] = OrderedDict()
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heapq.heappush(self._heap, (self.counters[tenant], tenant))
                self._forget_gone_tenants()
        return self._tenants[tenant]

    def _forget_gone_tenants(self) -> None:
        """Drop the heap entries of tenants without waiting groups, if most entries are stale."""
        if len(self._heap) > 2 * len(self._tenants) + MAX_STALE:
            self._heap = [(self.counters[tenant], tenant) for tenant in self._tenants]
            heapq.heapify(self._heap)
            self._in_heap = set(self._tenants)

    def _forget_idle_tenants(self, lowest: float) -> None:
        """Drop counters of idle tenants that would be raised anyway and, if there are too many, the lowest others."""
        ahead = sorted((c, t) for t, c in self.counters.items() if t not in self._tenants and c > lowest)
        kept = {t: c for c, t in ahead[-MAX_IDLE_TENANTS // 2 :]}
        self.counters = {t: self.counters[t] for t in self._tenants} | kept

    def _next_tenant(self) -> str:
        while True:
            counter, tenant = self._heap[0]
            if tenant not in self._tenants:
                heapq.heappop(self._heap)
                self._in_heap.remove(tenant)
            elif counter < self.counters[tenant]:
                heapq.heapreplace(self._heap, (self.counters[tenant], tenant))
            else:
                return tenant
