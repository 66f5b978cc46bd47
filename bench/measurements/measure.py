"""Sends a load to each system in turn. Only one system is under load at a time, and the CPU usage of the other systems
is measured to show that they are idle.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.loads.drive import System, drive
from bench.loads.figures import Figures, Run, rate, summarise
from bench.loads.load import Load
from bench.measurements.phases import Split, split_between
from bench.systems.pagewire_system import Pagewire
from bench.systems.processes import cpu_seconds, memory_mib

PAUSE_SECONDS = 1.0
"""Pause before each run in seconds. Threads that spin while they wait for work, as OpenMP's threads do, stop spinning
during this pause.
"""


@dataclass(slots=True)
class Measurement:
    """All runs of one load on each system."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    figures: dict[str, Figures] = field(default_factory=dict)
    idle_cpu_percent: dict[str, float] = field(default_factory=dict)
    """The largest CPU usage of a system while another system was under load, in percent of one core."""
    split: Split | None = None


async def measure(systems: Sequence[System], load: Load, vocabulary_size: int, rounds: int) -> Measurement:
    """Warm up all systems, then run the load `rounds` times on each system. In every second round, the order of the
    systems is reversed.

    If the machine's speed drifts, consecutive runs see the same drift, so that the drift affects all systems equally.
    Each round has new prompts, and all systems receive the same prompts in a round.
    """
    result = Measurement(runs={system.name: [] for system in systems})
    warm_up = load.warm_up()
    for system in systems:
        await drive(system, warm_up, warm_up.prompts(vocabulary_size, "warm-up"))
    readings = []
    memory = dict.fromkeys(result.runs, 0.0)
    for number in range(rounds):
        prompts = load.prompts(vocabulary_size, number)
        for system in systems if number % 2 == 0 else reversed(systems):
            await asyncio.sleep(PAUSE_SECONDS)
            idle = [other for other in systems if other is not system]
            cpu_before, began = [cpu_seconds(other.pids()) for other in idle], time.perf_counter()
            before = await system.step_split() if isinstance(system, Pagewire) else None
            run = await drive(system, load, prompts)
            if isinstance(system, Pagewire) and before is not None:
                readings.append((before, await system.step_split()))
            elapsed = time.perf_counter() - began
            for other, seconds in zip(idle, cpu_before, strict=True):
                percent = 100 * (cpu_seconds(other.pids()) - seconds) / elapsed
                result.idle_cpu_percent[other.name] = max(percent, result.idle_cpu_percent.get(other.name, 0.0))
            result.runs[system.name].append(run)
            memory[system.name] = max(memory[system.name], memory_mib(system.pids()))
            sys.stderr.write(f"{load.title}, round {number + 1}: {system.name} {rate([run]):.1f} output tok/s\n")
    result.figures = {name: summarise(runs, memory[name]) for name, runs in result.runs.items()}
    result.split = split_between(readings) if readings else None
    return result
