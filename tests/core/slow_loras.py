"""The adapters of a worker, derived anew from its groups each time."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slow_groups import SlowGroup
    from slow_scheduler import SlowScheduler


class SlowLoras:
    def __init__(self, scheduler: "SlowScheduler") -> None:
        self.scheduler = scheduler
        self.most = scheduler.config.max_held_loras
        self.clock = 0
        self.held: dict[str, int] = {}  # and when a group here needed one last; less than 0 if none ever did
        self.unused: dict[str, int] = {}  # that were brought for a group, and when
        self.tried: set[str] = set()
        self.fetching = ""

    def has(self, name: str) -> bool:
        return not name or not self.most or name in self.held

    def came(self, group: "SlowGroup") -> None:
        self.unused.pop(group.lora, None)

    def left(self, group: "SlowGroup") -> None:
        self.clock += 1
        if group.lora and self.most:
            self.held[group.lora] = self.clock

    @property
    def is_full(self) -> bool:
        return len(self.held) + bool(self.fetching) >= self.most

    def can_come(self, name: str) -> bool:
        return name == self.fetching or not self.is_full or bool(self.next_to_go())

    def next_to_go(self) -> str:
        here = {group.lora for group in self.scheduler.running + self.scheduler.swapped} - {""}
        live = here | {group.lora for group in self.scheduler.queue.groups}
        idle = {name: when for name, when in self.held.items() if name not in here}
        kept = [name for name in self.unused if name in live and (here or name not in self.tried)]
        return min((name for name in idle if name not in kept), key=idle.__getitem__, default="")

    def begin_fetch(self, wanted: list[str], preloads: list[str]) -> tuple[str, str] | None:
        wanted = [name for name in wanted if not self.has(name)]
        preloads = [name for name in preloads if not self.has(name)]
        dropped = ""
        if self.fetching or not (wanted or preloads) or (self.is_full and not wanted):
            return None
        if self.is_full:
            dropped = self.next_to_go()
            if not dropped:
                return None
            self.drop(dropped)
        self.is_wanted, self.fetching = bool(wanted), (wanted + preloads)[0]
        return self.fetching, dropped

    def end_fetch(self, is_held: bool) -> None:
        name, self.fetching = self.fetching, ""
        if is_held and self.is_wanted:
            self.clock += 1
            self.unused[name] = self.held[name] = self.clock
            self.tried.discard(name)
        elif is_held:
            self.hold(name)

    def hold(self, name: str) -> None:
        if not self.has(name):
            self.clock += 1
            self.held[name] = -self.clock

    def drop(self, name: str) -> None:
        self.held.pop(name, None)
        self.unused.pop(name, None)
