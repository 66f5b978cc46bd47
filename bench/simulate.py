"""Whole traces through the real scheduler on a virtual clock: python -m bench.simulate TRACE.csv …

Each trace runs with 1, 8 and 1,000 simulated workers under every policy, its clock sped up so far that requests have to
wait: without that all policies are alike. The traces name no senders, so at random one tenant sends 80% of the requests
and four light ones 5% each, and 10% of the requests are urgent, of whomever.

- p99 TTFT in seconds: of all requests, of those of the light tenants, of urgent ones.
- service gap: the most service, in thousands of tokens, that one tenant got more than another while both had requests
  waiting (`scheduler_service/simulation/fairness.py`).
- preemptions, by mode.

One process a core; the real time of a run is that beside the others. The last line is JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from scheduler_service.core import PreemptionMode
from scheduler_service.policy import POLICIES, waiting_queue
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.senders import deal
from scheduler_service.simulation.simulator import RequestTimes, Simulator
from scheduler_service.simulation.summary import ttft
from scheduler_service.simulation.trace import read_trace

# By workers. A sixth for each loads the built-in cost model on the conversation trace; a thousand of them admit every
# request at once unless the traces' hour passes in seven seconds.
SPEEDUPS = {1: 1 / 6, 8: 8 / 6, 1000: 500.0}
HEAVY = "heavy"
TENANTS = {HEAVY: 0.8, "light 1": 0.05, "light 2": 0.05, "light 3": 0.05, "light 4": 0.05}
URGENT = -100  # so urgent that ageing does not even it out
PRIORITIES = {0: 0.9, URGENT: 0.1}

Row = dict[str, str | int | float]


def run(case: tuple[str, int, str]) -> Row:
    trace, num_workers, policy = case
    arrivals = deal(read_trace(Path(trace), speedup=SPEEDUPS[num_workers]), TENANTS, PRIORITIES)
    began = time.perf_counter()
    result = Simulator(arrivals, CostModel(), num_workers=num_workers, waiting=waiting_queue(policy)).run()
    seconds = time.perf_counter() - began
    assert all(request.finished is not None for request in result.requests)

    def p99_ttft(wanted: Callable[[RequestTimes], bool]) -> float:
        return ttft([request for request in result.requests if wanted(request)])["p99"]

    return {
        "trace": Path(trace).stem,
        "workers": num_workers,
        "policy": policy,
        "p99_ttft": p99_ttft(lambda _: True),
        "p99_ttft_light": p99_ttft(lambda request: request.arrival.tenant != HEAVY),
        "p99_ttft_urgent": p99_ttft(lambda request: request.arrival.priority == URGENT),
        "service_gap_thousands": result.service_gap / 1000,
        "recompute": result.preemptions[PreemptionMode.RECOMPUTE],
        "swap": result.preemptions[PreemptionMode.SWAP],
        "output_tokens_per_second": result.output_tokens_per_second,
        "utilisation": result.utilisation,
        "real_seconds": seconds,
    }


COLUMNS = {
    "trace": "{trace}",
    "workers": "{workers:,}",
    "policy": "{policy}",
    "p99 TTFT": "{p99_ttft:,.1f}",
    "light": "{p99_ttft_light:,.1f}",
    "urgent": "{p99_ttft_urgent:,.1f}",
    "service gap": "{service_gap_thousands:,.0f}",
    "recompute/swap": "{recompute} / {swap}",
    "tok/s": "{output_tokens_per_second:,.0f}",
    "utilisation": "{utilisation:.2f}",
    "real s": "{real_seconds:.1f}",
}


def table_of(report: list[Row]) -> Table:
    table = Table()
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("trace", "policy") else "right")
    for row in report:
        cells = (cell.format(**row) for cell in COLUMNS.values())
        table.add_row(*cells, end_section=row["policy"] == POLICIES[-1])
    return table


def main() -> None:
    traces = sys.argv[1:] or sys.exit("bench.simulate: name at least one trace")
    cases = list(product(traces, SPEEDUPS, POLICIES))
    with ProcessPoolExecutor() as pool:
        report = list(track(pool.map(run, cases), total=len(cases), console=Console(stderr=True)))
    Console(file=sys.stdout, width=150).print(table_of(report))
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
