"""Shows the cluster on a terminal, or prints a line for each sample: queues, workers, blocks and rates."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagewire.v1 import admin_service_pb2 as pb
from pagewire_client.admin import Admin, Lost, Sample

STATUS_STYLES = {"serving": "green", "draining": "yellow", "drained": "dim", "connecting": "red", "superseded": "red"}


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second between two samples; empty after a restart of the scheduler, whose counts begin at 0."""

    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Sample | None, after: Sample) -> "Rates":
        """`steps` contains only workers that are in both samples."""
        if before is None or before.state.start_time_ms != after.state.start_time_ms or after.at <= before.at:
            return cls()
        seconds = after.at - before.at
        num_steps = {worker.address: worker.num_steps for worker in before.state.workers}
        return cls(
            (after.state.num_output_tokens - before.state.num_output_tokens) / seconds,
            (after.state.num_prompt_tokens - before.state.num_prompt_tokens) / seconds,
            {
                worker.address: (worker.num_steps - num_steps[worker.address]) / seconds
                for worker in after.state.workers
                if worker.address in num_steps
            },
        )


class View:
    """The last two samples, and the connection's last event."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._before: Sample | None = None
        self._sample: Sample | None = None
        self._is_lost = False
        self._news = "connecting …"
        self._has_news = False  # whether the last event changed `_news`

    def take(self, event: Sample | Lost) -> None:
        news = ""
        if isinstance(event, Lost):
            news = f"connection lost, trying again: {event.reason}"
        elif self._sample is None:
            self._news = ""
        elif self._sample.state.start_time_ms != event.state.start_time_ms:
            news = f"the scheduler was started again at {_clock(event.state.start_time_ms)}"
        elif self._is_lost:
            news = "connected again"
        self._has_news = bool(news)
        if news:
            self._news = f"{time.strftime('%H:%M:%S')} {news}"
        self._is_lost = isinstance(event, Lost)
        if isinstance(event, Sample):
            self._before, self._sample = self._sample, event

    @property
    def rates(self) -> Rates:
        return Rates() if self._sample is None else Rates.between(self._before, self._sample)

    # ---- output as a line

    def line(self) -> str:
        """The state as key=value pairs, after a new event of the connection."""
        if self._sample is None or self._is_lost:
            return self._news
        state, rates = self._sample.state, self.rates
        fields = {
            "requests": str(state.num_requests),
            "waiting": str(state.num_waiting),
            "running": str(sum(worker.num_running for worker in state.workers)),
            "swapped": str(sum(worker.num_swapped for worker in state.workers)),
            "workers": f"{_num_serving(state)}/{len(state.workers)}",
            "blocks": f"{_share_used(state.workers):.0%}",
            "output_tokens/s": f"{rates.output_tokens:.1f}",
            "prompt_tokens/s": f"{rates.prompt_tokens:.1f}",
            "steps/s": f"{sum(rates.steps.values()):.1f}",
            "cached": f"{_share_cached(state):.0%}",
            "preemptions": str(state.num_preemptions),
            "losses": str(state.num_losses),
        }
        if any(worker.num_guessed_tokens for worker in state.workers):
            fields["guessed_right"] = f"{_share_right(state.workers):.0%}"
        if any(worker.num_encoder_queries for worker in state.workers):
            fields["images_kept"] = f"{_share_kept(state.workers):.0%}"
        for kind, blocks in _blocks_by_kind(state.workers).items():
            fields[kind.replace(" ", "_")] = blocks
        words = [time.strftime("%H:%M:%S"), *(f"{name}={value}" for name, value in fields.items())]
        news = f"{self._news}\n" if self._has_news else ""
        error = f"\n{state.front_end_error}" if state.front_end_error else ""
        lacking = "".join(f"\n{worker.address}: {worker.last_error}" for worker in state.workers if worker.last_error)
        return news + " ".join([*words, *(["draining"] if state.draining else [])]) + error + lacking

    # ---- output on a full screen

    def __rich__(self) -> RenderableType:
        if self._sample is None:
            return Text(f"{self._target}: {self._news}")
        state = self._sample.state
        parts: list[RenderableType] = [self._summary(state), self._workers(state), *self._layer_groups(state)]
        if state.front_end_error:
            parts.append(Text(state.front_end_error, style="red"))
        if self._news:
            parts.append(Text(self._news, style="yellow"))
        return Group(*parts)

    def _summary(self, state: pb.ClusterState) -> RenderableType:
        rates = self.rates
        running = sum(worker.num_running for worker in state.workers)
        swapped = sum(worker.num_swapped for worker in state.workers)
        table = Table.grid(padding=(0, 2))
        table.add_row(
            Text(self._target, style="bold"),
            f"since {_clock(state.start_time_ms)}",
            self._status(state),
        )
        table.add_row(f"{state.num_waiting} waiting", f"{running} running", f"{swapped} swapped out")
        table.add_row(
            f"{rates.output_tokens:,.1f} tokens/s out",
            f"{rates.prompt_tokens:,.1f} tokens/s in",
            f"{_share_cached(state):.0%} of prompts cached",
        )
        table.add_row(
            f"{state.num_output_tokens:,} tokens out",
            f"{state.num_preemptions:,} preemptions",
            f"{state.num_losses:,} workers lost",
        )
        if any(worker.num_guessed_tokens for worker in state.workers):
            table.add_row(f"{_share_right(state.workers):.0%} of drafts accepted")
        if any(worker.num_encoder_queries for worker in state.workers):
            table.add_row(f"{_share_kept(state.workers):.0%} of images kept")
        return table

    def _status(self, state: pb.ClusterState) -> Text:
        if self._is_lost:
            return Text("out of reach", style="red")
        return Text("shutting down", style="yellow") if state.draining else Text("serving", style="green")

    def _workers(self, state: pb.ClusterState) -> RenderableType:
        rates = self.rates
        table = Table(expand=False)
        for heading in ("worker", "", "running", "swapped", "steps/s", "blocks", "used", "host", "lost", "last error"):
            table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=heading in _NUMBERS)
        for worker in state.workers:
            status = pb.WorkerStatus.Name(worker.status).removeprefix("WORKER_STATUS_").lower()
            used = worker.num_device_blocks - worker.num_free_device_blocks
            table.add_row(
                Text(worker.address),
                Text(status, style=STATUS_STYLES.get(status, "")),
                str(worker.num_running),
                str(worker.num_swapped),
                f"{rates.steps.get(worker.address, 0.0):.1f}",
                ProgressBar(total=max(1, worker.num_device_blocks), completed=used, width=12),
                f"{used}/{worker.num_device_blocks}",
                f"{worker.num_host_blocks - worker.num_free_host_blocks}/{worker.num_host_blocks}",
                str(worker.num_losses),
                Text(worker.last_error, style="red"),
            )
        return table

    def _layer_groups(self, state: pb.ClusterState) -> Iterator[Text]:
        """A line for each worker with several groups of layers."""
        for worker in state.workers:
            if blocks := _blocks_by_kind([worker]):
                groups = ", ".join(f"{kind}: {numbers}" for kind, numbers in blocks.items())
                yield Text(f"{worker.address}: blocks held+cached of layers {groups}")


_NUMBERS = ("running", "swapped", "steps/s", "used", "host", "lost")


async def watch(target: str, *, interval: float, once: bool, api_key: str = "", tls: Path | None = None) -> None:
    """Show the cluster until cancelled, or with `once` a single time."""
    console = Console()
    view = View(target)
    async with Admin(target, api_key=api_key, tls=tls) as admin:
        if once:
            view.take(await admin.state())
            console.print(view) if console.is_terminal else _print_line(view)
            return
        with _screen(console, view) as show:
            async for event in admin.watch(interval):
                view.take(event)
                show()


@contextlib.contextmanager
def _screen(console: Console, view: View) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the next event: live on a terminal, or else as a line."""
    if console.is_terminal:
        with Live(view, console=console, auto_refresh=False) as live:
            live.refresh()
            yield live.refresh
    else:
        yield lambda: _print_line(view)


def _print_line(view: View) -> None:
    sys.stdout.write(f"{view.line()}\n")
    sys.stdout.flush()


def _clock(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ms / 1000))


def _num_serving(state: pb.ClusterState) -> int:
    return sum(worker.status == pb.WORKER_STATUS_SERVING for worker in state.workers)


def _share_used(workers: Sequence[pb.WorkerState]) -> float:
    total = sum(worker.num_device_blocks for worker in workers)
    return 1 - sum(worker.num_free_device_blocks for worker in workers) / total if total else 0.0


def _share_right(workers: Sequence[pb.WorkerState]) -> float:
    """The accepted share of verified drafts, of which there must be at least one."""
    return sum(worker.num_accepted_tokens for worker in workers) / sum(worker.num_guessed_tokens for worker in workers)


def _share_kept(workers: Sequence[pb.WorkerState]) -> float:
    """The share of needed images that were encoded already. At least one must have been needed."""
    return sum(worker.num_encoder_hits for worker in workers) / sum(worker.num_encoder_queries for worker in workers)


def _blocks_by_kind(workers: Sequence[pb.WorkerState]) -> dict[str, str]:
    """The numbers of held and of cached blocks by kind of layers, such as "3+5". Only the prefix cache keeps a cached
    block. Workers with one group of layers are left out."""
    held, cached = Counter[str](), Counter[str]()
    for worker in workers:
        if len(worker.layer_groups) > 1:
            for group in worker.layer_groups:
                held[group.kind] += group.num_held_blocks
                cached[group.kind] += group.num_cached_blocks
    return {kind: f"{number}+{cached[kind]}" for kind, number in held.items()}


def _share_cached(state: pb.ClusterState) -> float:
    return state.num_cached_tokens / state.num_prompt_tokens if state.num_prompt_tokens else 0.0
