"""Workers as a page shows them: their state, their speed, and the blocks of their pools."""

from dataclasses import dataclass, field
from typing import Any

from scheduler_service.core import Scheduler
from scheduler_service.core.blocks.usage import layer_group_usage
from scheduler_service.view.pool import PoolView, Runs

RATE_SECONDS = 1.0
"""Seconds over which a worker's speed is measured, and after which its groups of layers are counted again."""
STALLED_SECONDS = 3.0
"""Seconds without an answer to a step after which a worker's requests count as stalled."""
_SESSION_FIELDS = ("block_size", "device_blocks", "host_blocks", "free_device", "free_host", "running", "swapped")


@dataclass(slots=True)
class WorkerNow:
    """A worker at one moment. `scheduler`: of its session; None without one. Counts include ended sessions."""

    address: str
    state: str
    scheduler: Scheduler | None = None
    draining: bool = False
    epoch: int = 0
    steps: int = 0
    losses: int = 0
    preemptions: int = 0
    error: str = ""

    def is_stalled(self, now: float) -> bool:
        """Whether the worker has not answered its oldest step for STALLED_SECONDS."""
        scheduler = self.scheduler
        if scheduler is None or not scheduler.steps_in_flight:
            return False
        return now - scheduler.in_flight.began_at > STALLED_SECONDS


@dataclass(slots=True)
class WorkerView:
    """One worker at the last look. `_measured_at` and `_sums`: when its speed was measured last, and the steps, tokens
    and seconds of its session until then."""

    fields: dict[str, Any] = field(default_factory=dict)
    _device: PoolView = field(default_factory=PoolView)
    _host: PoolView = field(default_factory=PoolView)
    _scheduler: Scheduler | None = None
    _measured_at: float = float("-inf")
    _sums: tuple[int, int, float] = (0, 0, 0.0)
    _step_ms: float = 0.0
    _tokens_per_second: float = 0.0
    _layer_groups: dict[str, list[int]] = field(default_factory=dict)

    def close(self) -> None:
        self._device.end()
        self._host.end()

    def look(self, one: WorkerNow, now: float) -> dict[str, Any]:
        """Note new values, and return the fields that changed."""
        self._measure(one.scheduler, now)
        fields = self._fields(one)
        changed = {name: value for name, value in fields.items() if self.fields.get(name, self) != value}
        self.fields = fields
        return changed

    def look_at_pools(self, scheduler: Scheduler | None) -> dict[str, Runs]:
        """The blocks that changed, by pool. Another session has other blocks, of which all are returned."""
        if scheduler is None:
            if self._scheduler is not None:
                self._scheduler = None
                self._device.clear()
                self._host.clear()
            return {}
        if self._scheduler is not scheduler:
            self._scheduler = scheduler
            blocks = scheduler.blocks
            return _without_empty(self._device.begin(blocks.device), self._host.begin(blocks.host))
        return _without_empty(self._device.look(), self._host.look())

    def all_runs(self) -> dict[str, Runs]:
        """The blocks that are not free, by pool."""
        return _without_empty(self._device.all_runs(), self._host.all_runs())

    def _measure(self, scheduler: Scheduler | None, now: float) -> None:
        """Measure the worker's speed and count its groups of layers, if RATE_SECONDS have passed."""
        if scheduler is None:
            self._measured_at, self._sums = now, (0, 0, 0.0)
            self._step_ms = self._tokens_per_second = 0.0
            self._layer_groups = {}
            return
        if (seconds := now - self._measured_at) < RATE_SECONDS:
            return
        steps, tokens, spent = self._sums
        done = scheduler.in_flight
        self._measured_at = now
        self._sums = (done.answered_steps, done.answered_tokens, done.answered_seconds)
        if (new_steps := done.answered_steps - steps) > 0:
            self._step_ms = round(1000 * (done.answered_seconds - spent) / new_steps, 3)
        self._tokens_per_second = round(max(0, done.answered_tokens - tokens) / seconds, 1)
        self._layer_groups = _count_layer_groups(scheduler)

    def _fields(self, one: WorkerNow) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "address": one.address,
            "state": one.state,
            "draining": one.draining,
            "epoch": one.epoch,
            "steps": one.steps,
            "losses": one.losses,
            "preemptions": one.preemptions,
            "error": one.error,
            "step_ms": self._step_ms,
            "tokens_per_second": self._tokens_per_second,
            "layer_groups": self._layer_groups,
        }
        if (scheduler := one.scheduler) is None:
            return fields | dict.fromkeys(_SESSION_FIELDS, 0)
        blocks = scheduler.blocks
        values = (
            blocks.block_size,
            blocks.device.num_blocks,
            blocks.host.num_blocks,
            blocks.device.num_free,
            blocks.host.num_free,
            len(scheduler.running),
            len(scheduler.swapped),
        )
        return fields | dict(zip(_SESSION_FIELDS, values, strict=True))


def _count_layer_groups(scheduler: Scheduler) -> dict[str, list[int]]:
    """Held and cached blocks by kind of layers; nothing if all layers are in one group."""
    if len(scheduler.config.groups) == 1:
        return {}
    counts: dict[str, list[int]] = {}
    for layers, num_held, num_cached in layer_group_usage(scheduler.blocks):
        held, cached = counts.get(layers.kind, (0, 0))
        counts[layers.kind] = [held + num_held, cached + num_cached]
    return counts


def _without_empty(device: Runs, host: Runs) -> dict[str, Runs]:
    return {name: runs for name, runs in (("device", device), ("host", host)) if runs}
