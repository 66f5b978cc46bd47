"""The low-rank adapters of one worker: which it holds, which its groups need, and which it is brought next.

A group runs only while the worker holds its adapter. With `max_held` of 0 the worker holds whatever there is. Otherwise
it holds so many in host memory, and the caller brings those that waiting groups lack, one after the other, beside the
steps: `begin_fetch` says which, and which other one gives way to it; `end_fetch` says that it is there.

The adapter that was used least recently gives way, of those that no group here needs. One that was brought for a group
that still waits stays until it has been used: else two groups that wait for room could take each other's adapters away
for ever. Where no group here needs any, such a one gives way too, once a step was planned that did not use it: its
group may stand behind the one that is to be next.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from scheduler_service.core.blocks.prefix_directory import PrefixDirectory
from scheduler_service.core.groups.sequence import SequenceGroup


class AdapterFetch(NamedTuple):
    """An adapter to bring to the worker, and the one that gives way to it, or an empty string."""

    adapter_id: str
    dropped: str


class Adapters:
    """`live` counts the live requests of each adapter, wherever they are; `directory` says which workers hold which."""

    def __init__(
        self, max_loras: int, max_held: int, live: Mapping[str, int], directory: PrefixDirectory, bit: int
    ) -> None:
        self._max_loras = max_loras
        self._max_held = max_held
        self._live = live
        self._directory = directory
        self._bit = bit
        self.running: Counter[str] = Counter()  # and how many running groups need each
        self._here: Counter[str] = Counter()  # and how many running or swapped groups need each
        self._idle: OrderedDict[str, None] = OrderedDict()  # held and needed by no group here, by when it was last
        self._fresh: set[str] = set()  # of those the ones that were brought for a group, and not used since
        self._untried: set[str] = set()  # of those the ones since which no step was planned
        self._on_device: OrderedDict[str, None] = OrderedDict()  # by their last use, as the worker keeps its slots
        self._to_give_way: str | None = None  # found out in this step, and nothing has changed since
        self._fetching = ""
        self.is_for_group = False
        """Whether what is being brought, or was last, was wanted, and not preloaded."""

    # ---- which are there

    @property
    def held(self) -> set[str]:
        """Adapters in the worker's host memory, as far as they are counted."""
        return {*self._here, *self._idle} if self._max_held else set()

    def holds(self, adapter_id: str) -> bool:
        """Whether the worker has what a group of this adapter needs, which is nothing without one."""
        if not adapter_id or not self._max_held:
            return True
        return adapter_id in self._here or adapter_id in self._idle

    def has_slot(self, group: SequenceGroup, *, without: Iterable[SequenceGroup] = ()) -> bool:
        """Whether the group's adapter is here and can join those of the running groups, `without` some of those."""
        if not group.adapter_id or group.adapter_id in self.running:
            return True
        if not self.holds(group.adapter_id):
            return False
        leaving = Counter(other.adapter_id for other in without)
        return sum(count > leaving[name] for name, count in self.running.items()) < self._max_loras

    def is_on_device(self, adapter_id: str) -> bool:
        """Whether a step with this adapter need not copy it to the device first."""
        return not adapter_id or adapter_id in self._on_device

    # ---- groups that come and go

    def came(self, group: SequenceGroup) -> None:
        """A waiting group was given to the worker."""
        self._to_give_way = None
        if name := group.adapter_id:
            self._here[name] += 1
            self._idle.pop(name, None)
            self._fresh.discard(name)

    def left(self, group: SequenceGroup) -> None:
        """It has ended here, or was given back."""
        self._to_give_way = None
        if name := group.adapter_id:
            self._here[name] -= 1
            if not self._here[name]:
                del self._here[name]
                if self._max_held:
                    self._idle[name] = None

    def started(self, group: SequenceGroup) -> None:
        """A group runs from now on."""
        if name := group.adapter_id:
            self.running[name] += 1
            self._used(name)

    def stopped(self, group: SequenceGroup) -> None:
        """It was swapped out, has ended, or was given back."""
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

    # ---- adapters that come and go

    @property
    def is_fetching(self) -> bool:
        """Whether one is being brought to the worker."""
        return bool(self._fetching)

    def can_come(self, adapter_id: str) -> bool:
        """Whether one that is not held is being brought, or could be, if not now then after the one that is."""
        if adapter_id == self._fetching or self._num_held < self._max_held:
            return True
        if self._to_give_way is None:
            self._to_give_way = self._first_to_give_way()
        return bool(self._to_give_way)

    def begin_fetch(self, wanted: Iterable[str], preloads: Iterable[str]) -> AdapterFetch | None:
        """Choose what to bring to the worker next, if there is a place for it.

        That is the first of `wanted` that is not held, or else of `preloads`, for which none gives way. None while one
        is being brought.
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
        """The worker has, or could not be brought, what `begin_fetch` chose last. Raises ValueError without any."""
        if not self._fetching:
            raise ValueError("no adapter is being brought to the worker")
        name, self._fetching = self._fetching, ""
        if is_held:
            self.hold(name, is_for_group=self.is_for_group)

    def hold(self, adapter_id: str, *, is_for_group: bool = False) -> None:
        """The worker has it, without having been brought it."""
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
        """A step was planned that could have used what is held."""
        self._untried.clear()
        self._to_give_way = None

    def ended(self) -> None:
        """A live request of an adapter has ended, wherever it was."""
        self._to_give_way = None

    def drop(self, adapter_id: str) -> bool:
        """Count one as not held; returns whether it was. Raises ValueError while a group here needs it."""
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
        """The worker is gone; no group is here any more."""
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
        """Whether an adapter is kept for a group that waits for it."""
        return name in self._fresh and self._live[name] > 0 and (bool(self._here) or name in self._untried)
