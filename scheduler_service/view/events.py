"""Events between two looks, in words: workers lost and ready, requests that moved, preemptions and drains."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_service.view.requests import PREEMPTIONS, RECOMPUTES, STATE, RequestView
from scheduler_service.view.words import many, name_of
from scheduler_service.view.workers import WorkerNow

MAX_PREEMPTIONS = 8
"""Preempted requests that are named in one frame."""

Event = dict[str, Any]


@dataclass(slots=True)
class _Loss:
    """A lost worker, and its requests that no worker has taken yet. `number`: all that were on it."""

    worker: str
    at: float
    number: int
    left: set[str]


class Events:
    def __init__(self) -> None:
        self._states: dict[str, tuple[str, int, int]] = {}  # state, losses and epoch of each worker
        self._counts: dict[str, tuple[int, int]] = {}  # preemptions of each request: swaps, recomputes
        self._losses: list[_Loss] = []

    def look(
        self,
        at: float,
        workers: Iterable[WorkerNow],
        requests: Mapping[str, RequestView],
        before: Mapping[str, str | None],
    ) -> list[Event]:
        """`before`: the worker of each request at the last look, if a worker was lost since."""
        found: list[tuple[str, str]] = []
        states, self._states = self._states, {one.address: (one.state, one.losses, one.epoch) for one in workers}
        for one in workers:
            state, losses, epoch = states.get(one.address, ("", one.losses, one.epoch))
            if one.losses > losses:
                mine = {id_ for id_, worker in before.items() if worker == one.address and id_ in requests}
                reason = f": {one.error}" if one.error and one.scheduler is None else ""
                found.append(("worker_lost", f"worker {one.address} lost with {many(len(mine), 'request')}{reason}"))
                if mine:
                    self._losses.append(_Loss(one.address, at, len(mine), mine))
            if one.state == state and one.epoch == epoch:
                continue
            if one.state == "serving" and state == "draining":
                found.append(("undrained", f"worker {one.address} takes requests again"))
            elif one.state == "serving" and one.scheduler is not None:
                blocks = one.scheduler.blocks.device.num_blocks
                found.append(("worker_ready", f"worker {one.address} ready with {many(blocks, 'block')}"))
            elif one.state == "draining":
                found.append(("draining", f"worker {one.address} finishes its requests and takes no new ones"))
            elif one.state == "drained":
                found.append(("drained", f"worker {one.address} is drained"))
            elif one.state == "superseded":
                found.append(("superseded", f"another scheduler uses worker {one.address}"))
        found += self._moved(at, requests)
        found += self._preempted(requests)
        return [{"at": at, "kind": kind, "text": text} for kind, text in found]

    def _moved(self, at: float, requests: Mapping[str, RequestView]) -> list[tuple[str, str]]:
        found, waits = [], []
        for loss in self._losses:
            loss.left = {id_ for id_ in loss.left if id_ in requests and requests[id_].changing[STATE] == "waiting"}
            if loss.left:
                waits.append(loss)
                continue
            moved = many(loss.number, "request")
            found.append(("moved", f"worker {loss.worker} lost, {moved} moved in {max(0.1, at - loss.at):.1f} s"))
        self._losses = waits
        return found

    def _preempted(self, requests: Mapping[str, RequestView]) -> list[tuple[str, str]]:
        found, counts = [], self._counts
        now: dict[str, tuple[int, int]] = {}
        for id_, view in requests.items():
            changing = view.changing
            now[id_] = mine = (changing[PREEMPTIONS], changing[RECOMPUTES])
            before = counts.get(id_, mine)
            if mine[0] > before[0]:
                found.append(("preempted", f"{name_of(view.group)} preempted: its blocks were swapped to the host"))
            elif mine[1] > before[1]:
                found.append(("preempted", f"{name_of(view.group)} preempted: it gives its blocks back, to recompute"))
        self._counts = now
        if len(found) > MAX_PREEMPTIONS:
            rest = len(found) - MAX_PREEMPTIONS + 1
            found[MAX_PREEMPTIONS - 1 :] = [("preempted", f"{many(rest, 'more request')} preempted")]
        return found
