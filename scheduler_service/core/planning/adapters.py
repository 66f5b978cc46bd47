"""The low-rank adapters of one worker: which adapters it holds, and which is fetched next.

A group runs only while the worker holds its adapter. The caller fetches missing adapters one at a time, beside the
steps. The least recently used adapter that no group on this worker needs is dropped.

An adapter that was fetched for a group is kept while that group waits; otherwise two groups could have each other's
adapters dropped for ever. While no group on this worker needs any adapter, a fetched adapter is kept only until the
next step is planned. Otherwise its group could wait behind a group that needs another adapter, and neither would start.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scheduler_service.core.blocks.allocator import PrefixDirectory
from scheduler_service.core.groups.sequence import SequenceGroup


class AdapterFetch(NamedTuple):
    """An adapter to fetch, and the adapter to drop for it, or an empty name."""

    adapter_id: str
    dropped: str


class Adapters:
    """The adapters that one worker holds: at most `max_held`, or all of them if `max_held` is 0. `live` counts each
    adapter's live requests, anywhere. `directory` stores each adapter's workers."""

    def __init__(
        self, max_loras: int, max_held: int, live: Mapping[str, int], directory: PrefixDirectory, bit: int
    ) -> None:
        self._max_loras = max_loras
        self._max_held = max_held
        self._live = live
        self._directory = directory
        self._bit = bit
        self.running: Counter[str] = Counter()  # running groups, by adapter
        self._here: Counter[str] = Counter()  # running or swapped groups, by adapter
        # Held adapters that no group here needs; the first is dropped first.
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._fresh: set[str] = set()  # idle, fetched for a group and not used since
        self._untried: set[str] = set()  # fresh, fetched after the last planned step
        self._on_device: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._to_give_way: str | None = None  # of `_first_to_give_way()`; None if unknown
        self._fetching = ""
        self.is_for_group = False
        """Whether the current or last fetch is for a waiting group, not a preload."""

    # ---- adapters that the worker holds

    @property
    def held(self) -> set[str]:
        """Adapters in the worker's host memory; empty if `max_held` is 0."""
        return {*self._here, *self._idle} if self._max_held else set()

    def holds(self, adapter_id: str) -> bool:
        """Whether the worker holds this adapter. True for the base model, whose id is empty."""
        if not adapter_id or not self._max_held:
            return True
        return adapter_id in self._here or adapter_id in self._idle

    def has_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the worker holds the adapter, and can run it beside the running groups except `without`."""
        if not group.adapter_id or group.adapter_id in self.running:
            return True
        if not self.holds(group.adapter_id):
            return False
        leaving = Counter(other.adapter_id for other in without)
        return sum(count > leaving[name] for name, count in self.running.items()) < self._max_loras

    def is_on_device(self, adapter_id: str) -> bool:
        return not adapter_id or adapter_id in self._on_device

    # ---- arrivals and departures of groups

    def came(self, name: str) -> None:
        self._to_give_way = None
        self._here[name] += 1
        self._idle.pop(name, None)
        self._fresh.discard(name)

    def left(self, name: str) -> None:
        self._to_give_way = None
        self._here[name] -= 1
        if not self._here[name]:
            del self._here[name]
            if self._max_held:
                self._idle[name] = None

    def started(self, name: str) -> None:
        self.running[name] += 1
        self._used(name)

    def stopped(self, name: str) -> None:
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
        return bool(self._fetching)

    def can_come(self, adapter_id: str) -> bool:
        """Whether a missing adapter is being fetched, or can be fetched next."""
        if adapter_id == self._fetching or self._num_held < self._max_held:
            return True
        if self._to_give_way is None:
            self._to_give_way = self._first_to_give_way()
        return bool(self._to_give_way)

    def begin_fetch(self, wanted: Iterable[str], preloads: Iterable[str]) -> AdapterFetch | None:
        """Choose the adapter to fetch next: the first of `wanted`, or else of `preloads`, that is not held.

        If the worker is full, another adapter is dropped first, but never for a preload. The result is None if no
        adapter can be fetched, or while an adapter is being fetched.
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
        """End the fetch, which failed if not `is_held`. Raises ValueError if no adapter is being fetched."""
        if not self._fetching:
            raise ValueError("no adapter is being fetched for the worker")
        name, self._fetching = self._fetching, ""
        if is_held:
            self.hold(name, is_for_group=self.is_for_group)

    def hold(self, adapter_id: str, *, is_for_group: bool = False) -> None:
        """Count an adapter as held. `is_for_group`: it was fetched for a waiting group."""
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
        """Stop counting an adapter as held. Returns whether it was. Raises ValueError if a group here needs the
        adapter."""
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
