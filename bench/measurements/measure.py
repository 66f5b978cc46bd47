"""Sends a load to each system in turn, and measures that the other systems are idle meanwhile."""

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
"""Pause before each run, in which spinning threads, such as OpenMP's, stop."""


@dataclass(slots=True)
class Measurement:
    """All runs of one load."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    figures: dict[str, Figures] = field(default_factory=dict)
    idle_cpu_percent: dict[str, float] = field(default_factory=dict)
    """The largest CPU usage of a system while another was under load, in percent of one core."""
    split: Split | None = None


async def measure(systems: Sequence[System], load: Load, vocabulary_size: int, rounds: int) -> Measurement:
    """Warm up all systems, then run the load `rounds` times on each, every second round in reverse order.

    Consecutive runs thus see the same drift of the machine. Each round has new prompts, the same for all systems.
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
