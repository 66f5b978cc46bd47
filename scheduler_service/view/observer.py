"""Looks at the core's objects, and returns what has changed since the last look as one frame.

A frame is a JSON object, whose fields docs/page.md describes. All frames after a snapshot, applied in order, give the
snapshot of the last look. The live engine looks ten times a second while a page is open, and a replay looks once a
step, so a live view and a recording are the same.

A look costs O(running + shown waiting requests + changed blocks), not O(blocks).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler_service.core import SequenceGroup, WaitingQueue
from scheduler_service.view.events import Events
from scheduler_service.view.requests import PLACE, WORKER, AllTables, Changing, RequestView, changing_fields
from scheduler_service.view.words import why_waits
from scheduler_service.view.workers import WorkerNow, WorkerView

MAX_PLACES = 1000
"""Waiting requests that are shown, from the head of the queue on. Requests that were shown before stay."""

Frame = dict[str, Any]


class Observer:
    """`origin`: the time that counts as 0, in seconds of the core's clock. `close` stops every collection of changes.

    Only one observer may look at a core at a time.
    """

    def __init__(self, origin: float = 0.0) -> None:
        self._origin = origin
        self._at = 0.0
        self._workers: dict[str, WorkerView] = {}
        self._requests: dict[str, RequestView] = {}
        self._totals: dict[str, int] = {}
        self._events = Events()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def look(
        self,
        now: float,
        workers: Iterable[WorkerNow],
        waiting: WaitingQueue,
        counts: Mapping[str, int],
    ) -> Frame:
        """The differences since the last look; `at` alone if there is none.

        `counts`: sums of tokens, preemptions and losses.
        """
        self._at = round(now - self._origin, 4)
        frame: Frame = {"at": self._at}
        found = list(workers)
        before = {id_: view.changing[WORKER] for id_, view in self._requests.items()} if self._loses(found) else {}
        self._look_at_workers(found, now, frame)
        self._look_at_requests(found, now, waiting, frame)
        totals = {
            "waiting": len(waiting),
            "running": sum(len(one.scheduler.running) for one in found if one.scheduler is not None),
            "swapped": sum(len(one.scheduler.swapped) for one in found if one.scheduler is not None),
            **counts,
        }
        if changed := {name: value for name, value in totals.items() if self._totals.get(name) != value}:
            frame["totals"] = changed
            self._totals = totals
        if events := self._events.look(self._at, found, self._requests, before):
            frame["events"] = events
        return frame

    def snapshot(self) -> Frame:
        """All that the last look has seen."""
        blocks = {id_: view.all_runs() for id_, view in self._workers.items()}
        return {
            "snapshot": True,
            "at": self._at,
            "workers": {id_: view.fields for id_, view in self._workers.items()},
            "blocks": {id_: runs for id_, runs in blocks.items() if runs},
            "requests": {id_: view.whole(self._origin) for id_, view in self._requests.items()},
            "totals": self._totals,
        }

    # ---- workers

    def _loses(self, workers: Iterable[WorkerNow]) -> bool:
        views = self._workers
        return any(one.losses > views[one.address].fields["losses"] for one in workers if one.address in views)

    def _look_at_workers(self, workers: Sequence[WorkerNow], now: float, frame: Frame) -> None:
        changed: dict[str, Any] = {}
        blocks: dict[str, Any] = {}
        for one in workers:
            view = self._workers.setdefault(one.address, WorkerView())
            if runs := view.look_at_pools(one.scheduler):
                blocks[one.address] = runs
            if different := view.look(one, now):
                changed[one.address] = different
        for gone in self._workers.keys() - {one.address for one in workers}:
            self._workers.pop(gone).close()
            changed[gone] = None
        if changed:
            frame["workers"] = changed
        if blocks:
            frame["blocks"] = blocks

    # ---- requests

    def _look_at_requests(self, workers: Sequence[WorkerNow], now: float, waiting: WaitingQueue, frame: Frame) -> None:
        changed: dict[str, Any] = {}
        before, self._requests = self._requests, {}
        for one in workers:
            if (scheduler := one.scheduler) is None:
                continue
            state, tables = "stalled" if one.is_stalled(now) else "running", scheduler.blocks.all_tables
            for group in scheduler.running:
                id_ = group.request_id
                view = before.get(id_)
                if view is not None and view.group is group and state == "running":
                    different = view.look_at_decode(one.address, tables)
                    if different is not None:
                        self._requests[id_] = view
                        if different:
                            changed[id_] = different
                        continue
                self._see(group, before, changing_fields(group, one.address, state), tables, changed)
            for group in scheduler.swapped:
                changing = changing_fields(group, one.address, "swapped")
                self._see(group, before, changing, scheduler.blocks.all_host_tables, changed)
        schedulers = [one.scheduler for one in workers if one.scheduler is not None]
        for place, group in enumerate(waiting.upcoming(MAX_PLACES, equals=False)):
            view = before.get(group.request_id)
            if place and view is not None and view.has_waited(group) and view.changing[PLACE] == place:
                self._requests[group.request_id] = view
                continue
            reason = "requests before it wait" if place else why_waits(group, schedulers)
            self._see(group, before, changing_fields(group, None, "waiting", place, reason), None, changed)
        ended = []
        for id_, view in before.items():
            if (seen := self._requests.get(id_)) is view:
                continue
            if seen is None and waiting.get(id_) is view.group:  # it waits, behind the places that were read
                self._see(view.group, before, changing_fields(view.group, None, "waiting"), None, changed)
                continue
            if seen is None:
                changed[id_] = None
            ended.append({"id": id_, "at": self._at, **_end_of(view.group)})
        if changed:
            frame["requests"] = changed
        if ended:
            frame["ended"] = ended

    def _see(
        self,
        group: SequenceGroup,
        before: Mapping[str, RequestView],
        changing: Changing,
        tables: AllTables | None,
        changed: dict[str, Any],
    ) -> None:
        """`tables`: of the pool that has the request's blocks, for each group of layers."""
        id_ = group.request_id
        view = before.get(id_)
        if view is None or view.group is not group:
            view = RequestView(group)
            changed[id_] = view.first_fields(self._origin) | (view.look(changing, tables) or {})
        elif different := view.look(changing, tables):
            changed[id_] = different
        self._requests[id_] = view


def _end_of(group: SequenceGroup) -> dict[str, str]:
    ends = group.ends or [sequence.status for sequence in group.sequences]
    names = dict.fromkeys(end.name.lower().removeprefix("finished_") for end in ends)
    return {"status": ", ".join(names), "error": group.error or ""}
