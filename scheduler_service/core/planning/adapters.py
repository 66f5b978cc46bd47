"""The low-rank adapters of one worker: which adapters it holds, which its groups need, and which is fetched next.

A group runs only while the worker holds its adapter. If `max_held` is 0, the worker holds every adapter. If `max_held`
is positive, the worker holds at most `max_held` adapters in host memory. The caller fetches the missing adapters of
waiting groups one at a time, while the worker computes steps. `begin_fetch` chooses the adapter to fetch and the
adapter to drop for it. `end_fetch` reports the result.

The adapter to drop is the least recently used adapter that no group on this worker needs. An adapter that was fetched
for a group is kept while that group waits. Without this rule, two waiting groups could have each other's adapters
dropped for ever. If no group on this worker needs any adapter, a fetched adapter is kept only until the next step is
planned. If the adapter were kept longer, its group could wait behind a group that needs another adapter, and neither
would start.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scheduler_service.core.blocks.prefix_directory import PrefixDirectory
from scheduler_service.core.groups.sequence import SequenceGroup


class AdapterFetch(NamedTuple):
    """An adapter to fetch, and the adapter to drop for it. `dropped` is empty if no adapter is dropped."""

    adapter_id: str
    dropped: str


class Adapters:
    """Tracks the adapters that one worker holds.

    `live` counts the live requests of each adapter, in the queue and on all workers. `directory` stores which workers
    hold each adapter.
    """

    def __init__(
        self, max_loras: int, max_held: int, live: Mapping[str, int], directory: PrefixDirectory, bit: int
    ) -> None:
        self._max_loras = max_loras
        self._max_held = max_held
        self._live = live
        self._directory = directory
        self._bit = bit
        self.running: Counter[str] = Counter()  # Number of running groups that need each adapter.
        self._here: Counter[str] = Counter()  # Number of running or swapped groups that need each adapter.
        # Held adapters that no group on this worker needs; the first adapter is dropped first.
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._fresh: set[str] = set()  # Idle adapters that were fetched for a group and not used since.
        self._untried: set[str] = set()  # Fresh adapters that were fetched after the last planned step.
        self._on_device: OrderedDict[str, None] = OrderedDict()  # Adapters on the device, least recently used first.
        self._to_give_way: str | None = None  # Cached result of `_first_to_give_way()`; None if unknown.
        self._fetching = ""
        self.is_for_group = False
        """Whether the current or last fetch is for a waiting group. False for a preload."""

    # ---- adapters that the worker holds

    @property
    def held(self) -> set[str]:
        """Adapters in the worker's host memory; empty if `max_held` is 0."""
        return {*self._here, *self._idle} if self._max_held else set()

    def holds(self, adapter_id: str) -> bool:
        """Whether the worker holds this adapter. True for the base model, whose adapter id is empty."""
        if not adapter_id or not self._max_held:
            return True
        return adapter_id in self._here or adapter_id in self._idle

    def has_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the worker holds the group's adapter, and can run it together with the adapters of the running
        groups.

        Groups in `without` do not count as running.
        """
        if not group.adapter_id or group.adapter_id in self.running:
            return True
        if not self.holds(group.adapter_id):
            return False
        leaving = Counter(other.adapter_id for other in without)
        return sum(count > leaving[name] for name, count in self.running.items()) < self._max_loras

    def is_on_device(self, adapter_id: str) -> bool:
        """Whether the adapter is on the device already, so that a step need not copy it."""
        return not adapter_id or adapter_id in self._on_device

    # ---- arrivals and departures of groups

    def came(self, group: SequenceGroup) -> None:
        """Note that a waiting group was given to the worker."""
        self._to_give_way = None
        if name := group.adapter_id:
            self._here[name] += 1
            self._idle.pop(name, None)
            self._fresh.discard(name)

    def left(self, group: SequenceGroup) -> None:
        """Note that a group of the worker has ended, or was returned to the queue."""
        self._to_give_way = None
        if name := group.adapter_id:
            self._here[name] -= 1
            if not self._here[name]:
                del self._here[name]
                if self._max_held:
                    self._idle[name] = None

    def started(self, group: SequenceGroup) -> None:
        """Note that a group with an adapter starts to run."""
        if name := group.adapter_id:
            self.running[name] += 1
            self._used(name)

    def stopped(self, group: SequenceGroup) -> None:
        """Note that a running group was swapped out, has ended, or was returned to the queue."""
        if name := group.adapter_id:
            self._used(name)
            self.running[name] -= 1
            if not self.running[name]:
                del self.running[name]

    def _used(self, name: str) -> None:
        self._on_device[name] = None
        self._on_device.move_to_end(name)
        if len(self._on_device) > self._max_loras:
            del self._on_device[next(other for other in self._on_device if other not in self.running)]

    # ---- fetched and dropped adapters

    @property
    def is_fetching(self) -> bool:
        """Whether an adapter is being fetched for the worker."""
        return bool(self._fetching)

    def can_come(self, adapter_id: str) -> bool:
        """Whether a missing adapter is being fetched, or can be fetched after the current fetch."""
        if adapter_id == self._fetching or self._num_held < self._max_held:
            return True
        if self._to_give_way is None:
            self._to_give_way = self._first_to_give_way()
        return bool(self._to_give_way)

    def begin_fetch(self, wanted: Iterable[str], preloads: Iterable[str]) -> AdapterFetch | None:
        """Choose the adapter to fetch next; None if no adapter can be fetched now.

        The first adapter of `wanted` that is not held is fetched. If the worker holds `max_held` adapters, an adapter
        is dropped first. If all of `wanted` are held, the first missing adapter of `preloads` is fetched. No held
        adapter is dropped to make room for a preload. While an adapter is being fetched, the result is None.
        """
        if self._fetching:
            return None
        is_full = self._num_held >= self._max_held
        name, dropped = self._first_lacking(wanted), ""
        self.is_for_group = bool(name)
        if name and is_full:
            dropped = self._first_to_give_way()
        elif not name and not is_full:
            name = self._first_lacking(preloads)
        if not name or (is_full and not dropped):
            return None
        if dropped:
            self.drop(dropped)
        self._fetching = name
        return AdapterFetch(name, dropped)

    def end_fetch(self, *, is_held: bool) -> None:
        """End the fetch that `begin_fetch` began. `is_held` is false if the fetch failed. Raises ValueError if no
        adapter is being fetched."""
        if not self._fetching:
            raise ValueError("no adapter is being brought to the worker")
        name, self._fetching = self._fetching, ""
        if is_held:
            self.hold(name, is_for_group=self.is_for_group)

    def hold(self, adapter_id: str, *, is_for_group: bool = False) -> None:
        """Count an adapter as held. `is_for_group`: the adapter was fetched for a waiting group."""
        if not self._max_held or self.holds(adapter_id):
            return
        self._to_give_way = None
        self._idle[adapter_id] = None
        if is_for_group:
            self._fresh.add(adapter_id)
            self._untried.add(adapter_id)
        else:
            self._idle.move_to_end(adapter_id, last=False)
        self._directory.add(adapter_id.encode(), self._bit)

    def planned(self) -> None:
        """Note that a step was planned, in which every held adapter could be used."""
        self._untried.clear()
        self._to_give_way = None

    def ended(self) -> None:
        """Note that a live request with an adapter has ended, in the queue or on any worker."""
        self._to_give_way = None

    def drop(self, adapter_id: str) -> bool:
        """Stop counting an adapter as held by the worker. Returns whether the worker held the adapter.

        Raises ValueError if a group on this worker needs the adapter.
        """
        if adapter_id in self._here:
            raise ValueError(f"groups of the worker need the adapter {adapter_id}")
        if adapter_id not in self._idle:
            return False
        self._to_give_way = None
        del self._idle[adapter_id]
        self._fresh.discard(adapter_id)
        self._on_device.pop(adapter_id, None)
        self._directory.remove(adapter_id.encode(), self._bit)
        return True

    def withdraw_all(self) -> None:
        """Drop all adapters after the worker is gone. No group may be left on the worker."""
        for name in self.held:
            self.drop(name)

    @property
    def _num_held(self) -> int:
        return len(self._here) + len(self._idle) + bool(self._fetching)

    def _first_lacking(self, names: Iterable[str]) -> str:
        return next((name for name in names if not self.holds(name)), "")

    def _first_to_give_way(self) -> str:
        return next((name for name in self._idle if not self._stays(name)), "")

    def _stays(self, name: str) -> bool:
        """Whether an adapter is kept because a group waits for it."""
        return name in self._fresh and self._live[name] > 0 and (bool(self._here) or name in self._untried)
