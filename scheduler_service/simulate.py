"""Plan capacity without a GPU: pagewire simulate --trace FILE.csv --workers 8

Prints latencies, throughput and utilisation of each policy side by side; the last line is JSON. --plot OUT.png draws
latencies and queues.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pagewire_common.old_names import renamed
from scheduler_service.core import PhaseRule, PreemptionMode
from scheduler_service.policies import POLICIES, checked_policy, waiting_queue
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.senders import deal
from scheduler_service.simulation.simulator import Result, Simulator
from scheduler_service.simulation.summary import summarise
from scheduler_service.simulation.trace import read_trace

OLD_NAMES = {"policy": "scheduling_policy", "max_prefill_chunk": "long_prefill_token_threshold"}
PROGRAM = "scheduler_service.simulate"
SECONDS = ("ttft", "tpot", "e2e", "queued")
UNITS = {"output_tokens_per_second": " (virtual)", "utilisation": ", share of 1", "cached_tokens": " of prompts"}
"""Ends of the table's names, by figure."""


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--workers", type=_positive_int, default=1, help="simulated workers (default 1)")
    parser.add_argument("--cost-model", type=Path, help="JSON with the fields of CostModel")
    parser.add_argument(
        "--scheduling-policy",
        action="append",
        type=_policy,
        help=f"{', '.join(POLICIES)}, or one of an installed package; may be repeated (default: the first three)",
    )
    parser.add_argument("--preemption-mode", type=PreemptionMode, default=PreemptionMode.AUTO)
    parser.add_argument("--phase-rule", type=PhaseRule, default=PhaseRule.CHUNKED)
    parser.add_argument(
        "--long-prefill-token-threshold",
        type=_positive_int,
        default=0,
        help="most tokens of a prompt in a step that others need too (default: a quarter of the step)",
    )
    parser.add_argument("--speedup", type=_positive, default=1.0, help="divides the trace's times")
    parser.add_argument("--limit", type=_positive_int, help="take the first requests only")
    parser.add_argument(
        "--tenants",
        type=_shares,
        default={"": 1.0},
        help='shares of requests by tenant, as JSON: {"crowd": 8, "guest": 1}',
    )
    parser.add_argument(
        "--priorities",
        type=_priorities,
        default={0: 1.0},
        help='shares of requests by priority, as JSON: {"0": 9, "-10": 1}; lower runs first',
    )
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw time to first token, queue and running requests"
    )
    return parser


def parse_arguments(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> argparse.Namespace:
    parser = make_parser(program)
    try:
        words, lines = renamed(sys.argv[1:] if arguments is None else arguments, OLD_NAMES)
    except ValueError as error:
        parser.error(str(error))
    for line in lines:
        sys.stderr.write(f"{line}\n")
    return parser.parse_args(words)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from error


def _positive_int(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _policy(text: str) -> str:
    try:
        return checked_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _shares(text: str) -> dict[str, float]:
    try:
        shares = json.loads(text)
    except ValueError:
        shares = None
    if not isinstance(shares, dict) or not shares:
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object of names and shares")
    return {name: _positive(str(share)) for name, share in shares.items()}


def _priorities(text: str) -> dict[int, float]:
    return {_whole(priority): share for priority, share in _shares(text).items()}


def main(program: str = PROGRAM) -> None:
    arguments = parse_arguments(program=program)
    save = _import_plot(arguments.plot, program) if arguments.plot else None
    try:
        arrivals = read_trace(arguments.trace, speedup=arguments.speedup, limit=arguments.limit)
        arrivals = deal(arrivals, arguments.tenants, arguments.priorities)
        cost_model = CostModel.read(arguments.cost_model) if arguments.cost_model else CostModel()
        results: dict[str, Result] = {}
        report: dict[str, dict[str, object]] = {}
        with Progress(console=Console(stderr=True)) as bar:
            for policy in arguments.scheduling_policy or POLICIES:
                task = bar.add_task(policy, total=len(arrivals))
                simulator = Simulator(
                    arrivals,
                    cost_model,
                    num_workers=arguments.workers,
                    waiting=waiting_queue(policy),
                    preemption_mode=arguments.preemption_mode,
                    phase_rule=arguments.phase_rule,
                    max_prefill_chunk=arguments.long_prefill_token_threshold,
                )
                began = time.perf_counter()
                result = simulator.run(lambda count, task=task: bar.update(task, completed=count))  # type: ignore[misc]
                report[policy] = {**summarise(result), "real_seconds": time.perf_counter() - began}
                results[policy] = result
        if save:
            save(results, f"{arguments.trace.stem}, simulated workers: {arguments.workers:,}", arguments.plot)
    except (ValueError, OSError) as error:
        sys.exit(f"{program}: {error}")
    Console(file=sys.stdout).print(_table(report))
    sys.stdout.write(json.dumps(report) + "\n")


def _import_plot(path: Path, program: str) -> Callable[[Mapping[str, Result], str, Path], None]:
    """Import the plotting module. Exits before the simulation if the figure cannot be drawn."""
    try:
        from scheduler_service.simulation.plot import check, save
    except ModuleNotFoundError:
        sys.exit(f"{program}: --plot needs matplotlib, which pip install -e '.[plot]' installs")
    try:
        check(path)
    except ValueError as error:
        sys.exit(f"{program}: {error}")
    return save


def _table(report: dict[str, dict[str, object]]) -> Table:
    table = Table("figure")
    for policy in report:
        table.add_column(policy, justify="right")
    columns = [dict(_rows(figures)) for figures in report.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _rows(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, figure in figures.items():
        if isinstance(figure, dict):
            yield from _rows(figure, f"{prefix}{name} ")
        else:
            label = f"{prefix}{name}".replace("_", " ")
            unit = ", s" if prefix.startswith(SECONDS) else UNITS.get(name, "")
            yield f"{label}{unit}", f"{figure:,.3f}" if isinstance(figure, float) else f"{figure:,}"


if __name__ == "__main__":
    main()
