"""The one queue of requests that no worker has been given yet, shared by every worker's scheduler."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from scheduler_service.core.sequence import SequenceGroup


class WaitingQueue:
    """First come, first served. Preempted groups go back to the head. Every operation is O(1)."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, SequenceGroup] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def append(self, group: SequenceGroup) -> None:
        """Add an arrival; raises ValueError when its request_id waits already."""
        if group.request_id in self._groups:
            raise ValueError(f"request {group.request_id!r} is waiting already")
        self._groups[group.request_id] = group

    def put_back(self, groups: Iterable[SequenceGroup]) -> None:
        """Return groups to the head; the first of them will be the new head."""
        for group in reversed(list(groups)):
            self._groups[group.request_id] = group
            self._groups.move_to_end(group.request_id, last=False)

    @property
    def head(self) -> SequenceGroup:
        return next(iter(self._groups.values()))

    def pop(self) -> SequenceGroup:
        return self._groups.popitem(last=False)[1]

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def remove(self, request_id: str) -> None:
        """Take a group out of the middle; nothing happens when it does not wait here."""
        self._groups.pop(request_id, None)
