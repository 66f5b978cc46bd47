"""Measures how many workers one scheduler process keeps busy, by adding workers that sleep instead of computing.

Each runs 256 sequences in steps of 20 ms. Requests have 64 prompt tokens and 128 to 384 output tokens, and some always
wait. Every token is detokenized and streamed. If the scheduler's CPU time is nearly one core, Python's global
interpreter lock limits the scheduler.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.fleet.child import Child
from bench.fleet.sleeping_servicer import MAX_NUM_SEQS
from bench.loads.drive import BenchError
from bench.systems.processes import cpu_seconds, engine_process
from pagewire_client.local import ADMIN, ServiceProcess

STEP_MS = 20.0
WORKERS_A_PROCESS = 8
MAX_IDLE_PERCENT = 5.0
WAITING_SHARE = 0.125
"""Streams that wait, as a share of the streams that run. Some requests must always wait."""
RAMP_SECONDS = 60.0
SETTLE_SECONDS = 3.0
WINDOW_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Feeding:
    """The figures with one number of workers."""

    num_workers: int
    idle_percent: float
    """Time in which the workers compute no step."""
    sequences_a_step: float
    tokens_per_second: float
    """Tokens of streams that ended during the measurement."""
    messages_per_second: float
    tokens_a_message: float
    engine_us: float
    front_ends_us: float
    """CPU microseconds per token, of all front ends."""
    engine_cores: float
    """CPU seconds of the engine's process per second; above 1 when gRPC's threads run in parallel with Python's."""
    front_ends_cores: float
    busiest_percent: float
    """The busiest front end's share of the CPU time of all."""
    workers_cores: float
    client_cores: float

    @property
    def is_fed(self) -> bool:
        """Whether the workers are busy. A step that is half empty counts as half idle."""
        return self.idle_percent < MAX_IDLE_PERCENT and self.sequences_a_step > 0.95 * MAX_NUM_SEQS


def measure(
    num_workers: int,
    model: Path,
    scheduler_arguments: Sequence[str] = (),
    *,
    num_streams: int | None = None,
    num_connections: int | None = None,
) -> Feeding:
    """Start all processes, wait until the workers' steps are full, and measure for a few seconds.

    By default there are more streams than can run at once, and a connection for every 64 streams.
    """
    with contextlib.ExitStack() as stack:
        groups = []
        for start in range(0, num_workers, WORKERS_A_PROCESS):
            count = min(WORKERS_A_PROCESS, num_workers - start)
            arguments = ("--count", str(count), "--model", str(model), "--step-ms", str(STEP_MS))
            groups.append(stack.enter_context(Child("bench.fleet.sleeping_workers", *arguments)))
        addresses = ",".join(address for group in groups for address in group.first)
        scheduler = ServiceProcess(
            "scheduler_service",
            [
                "--listen", "127.0.0.1:0", *ADMIN, "--model", str(model), "--workers", addresses,
                "--max-num-requests", "1000000", *scheduler_arguments,
            ],
        )  # fmt: skip
        stack.callback(scheduler.stop)
        target = str(scheduler.wait_for("listening", 60)["address"])
        scheduler.wait_for("ready", 60)
        if num_streams is None:
            num_streams = int(num_workers * MAX_NUM_SEQS * (1 + WAITING_SHARE))
        of_load = ["--target", target, "--streams", str(num_streams)]
        if num_connections is not None:
            of_load += ["--connections", str(num_connections)]
        load = stack.enter_context(Child("bench.fleet.raw_load", *of_load))
        engine = engine_process(scheduler.process.pid).pid
        front_ends = [one.pid for one in psutil.Process(scheduler.process.pid).children() if one.pid != engine]

        def read() -> dict[str, float]:
            workers = [worker for group in groups for worker in group.ask().values()]
            return {
                **load.ask(),
                **{name: sum(worker[name] for worker in workers) for name in workers[0]},
                "engine_cpu": cpu_seconds([engine], descendants=False),
                **{f"front_end_cpu_{pid}": cpu_seconds([pid]) for pid in front_ends},
                "workers_cpu": cpu_seconds([group.process.pid for group in groups]),
                "now": time.monotonic(),
            }

        _ramp_up(read, min(MAX_NUM_SEQS, num_streams / num_workers))
        before = read()
        time.sleep(WINDOW_SECONDS)
        after = read()
        gained = {name: after[name] - before[name] for name in after}
        seconds = gained["now"]
        each_cpu = [gained[f"front_end_cpu_{pid}"] for pid in front_ends]
        front_ends_cpu = sum(each_cpu)
        num_tokens = max(gained["num_sequences"], 1)
        return Feeding(
            num_workers,
            idle_percent=max(0.0, 100 * (1 - gained["num_steps"] * STEP_MS / 1e3 / (seconds * num_workers))),
            sequences_a_step=gained["num_sequences"] / max(gained["num_steps"], 1),
            tokens_per_second=gained["num_tokens"] / seconds,
            messages_per_second=gained["num_messages"] / seconds,
            tokens_a_message=gained["num_tokens"] / max(gained["num_messages"], 1),
            engine_us=gained["engine_cpu"] * 1e6 / num_tokens,
            front_ends_us=front_ends_cpu * 1e6 / num_tokens,
            engine_cores=gained["engine_cpu"] / seconds,
            front_ends_cores=front_ends_cpu / seconds,
            busiest_percent=100 * max(each_cpu) / front_ends_cpu,
            workers_cores=gained["workers_cpu"] / seconds,
            client_cores=gained["cpu_seconds"] / seconds,
        )


def _ramp_up(read: Callable[[], dict[str, float]], full: float) -> None:
    """Wait until the workers' steps are full, at most RAMP_SECONDS, then SETTLE_SECONDS more."""
    until = time.monotonic() + RAMP_SECONDS
    before = read()
    while time.monotonic() < until:
        time.sleep(1.0)
        after = read()
        steps = after["num_steps"] - before["num_steps"]
        if steps and (after["num_sequences"] - before["num_sequences"]) / steps > 0.95 * full:
            break
        before = after
    time.sleep(SETTLE_SECONDS)


def search(model: Path, most: int, tell: Callable[[Feeding], None]) -> list[Feeding]:
    """Double the number of workers until the scheduler cannot keep all busy, then bisect.

    The figures are sorted by the number of workers. Raises BenchError if a single worker is too many.
    """
    seen: dict[int, Feeding] = {}

    def look(num_workers: int) -> bool:
        seen[num_workers] = feeding = measure(num_workers, model)
        tell(feeding)
        return feeding.is_fed

    fed, hungry = 0, 1
    while hungry <= most and look(hungry):
        fed, hungry = hungry, 2 * hungry
    while hungry - fed > 1 and hungry <= most:
        middle = (fed + hungry) // 2
        if look(middle):
            fed = middle
        else:
            hungry = middle
    if not fed:
        raise BenchError("the scheduler does not keep a single worker busy here")
    return [seen[number] for number in sorted(seen)]
