"""Plan capacity without a GPU: python -m scheduler_service.simulate --trace FILE.csv --workers 8

Prints latencies, throughput and utilisation of each policy side by side; the last line is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scheduler_service.core import FairQueue, PhaseRule, PreemptionMode, PriorityQueue, WaitingQueue
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.simulator import Result, Simulator
from scheduler_service.simulation.trace import read_trace

POLICIES = {"fcfs": WaitingQueue, "priority": PriorityQueue, "fair": FairQueue}
PERCENTILES = (50, 90, 99)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scheduler_service.simulate", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--workers", type=_positive_int, default=1, help="simulated workers (default 1)")
    parser.add_argument("--cost-model", type=Path, help="JSON with the fields of CostModel")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated (default: all)")
    parser.add_argument("--preemption-mode", type=PreemptionMode, default=PreemptionMode.AUTO)
    parser.add_argument("--phase-rule", type=PhaseRule, default=PhaseRule.CHUNKED)
    parser.add_argument("--speedup", type=_positive, default=1.0, help="divides the trace's times")
    parser.add_argument("--limit", type=_positive_int, help="take the first requests only")
    parser.add_argument("--tenants", type=_positive_int, default=1, help="deal requests out to so many tenants in turn")
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in PERCENTILES}


def summarise(result: Result) -> dict[str, object]:
    """Figures of one run: latencies in seconds, throughput in output tokens a second of virtual time."""
    return {
        **{
            name: percentiles([getattr(r, name) for r in result.requests]) for name in ("ttft", "tpot", "e2e", "queued")
        },
        "output_tokens_per_second": result.output_tokens_per_second,
        "utilisation": result.utilisation,
        "preemptions": {mode.value: count for mode, count in result.preemptions.items()},
        "cached_tokens": result.cached_tokens,
        "steps": result.num_steps,
        "virtual_seconds": result.seconds,
    }


def main() -> None:
    arguments = parse_arguments()
    try:
        arrivals = read_trace(arguments.trace, speedup=arguments.speedup, limit=arguments.limit)
        cost_model = CostModel.read(arguments.cost_model) if arguments.cost_model else CostModel()
        report: dict[str, dict[str, object]] = {}
        with Progress(console=Console(stderr=True)) as bar:
            for policy in arguments.policy or POLICIES:
                task = bar.add_task(policy, total=len(arrivals))
                simulator = Simulator(
                    arrivals,
                    cost_model,
                    num_workers=arguments.workers,
                    waiting=POLICIES[policy](),
                    preemption_mode=arguments.preemption_mode,
                    phase_rule=arguments.phase_rule,
                    num_tenants=arguments.tenants,
                )
                began = time.perf_counter()
                result = simulator.run(lambda count, task=task: bar.update(task, completed=count))  # type: ignore[misc]
                report[policy] = {**summarise(result), "real_seconds": time.perf_counter() - began}
    except ValueError as error:
        sys.exit(f"scheduler_service.simulate: {error}")
    Console(file=sys.stdout).print(_table(report))
    sys.stdout.write(json.dumps(report) + "\n")


def _table(report: dict[str, dict[str, object]]) -> Table:
    table = Table("figure", *report)
    for name in next(iter(report.values())):
        table.add_row(name, *(_cell(figures[name]) for figures in report.values()))
    return table


def _cell(figure: object) -> str:
    if isinstance(figure, dict):
        return "  ".join(f"{name} {_cell(value)}" for name, value in figure.items())
    return f"{figure:,.3f}" if isinstance(figure, float) else f"{figure:,}"


if __name__ == "__main__":
    main()
