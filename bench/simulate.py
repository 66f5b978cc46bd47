"""Whole traces through the real scheduler on a virtual clock: python -m bench.simulate TRACE.csv …

Each trace runs with 1, 8 and 1,000 simulated workers, its clock sped up in proportion, under every policy. The last
line is JSON.
"""

import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scheduler_service.core import PreemptionMode
from scheduler_service.simulate import POLICIES, percentiles
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.simulator import Simulator
from scheduler_service.simulation.trace import read_trace

WORKERS = (1, 8, 1000)
SPEEDUP_PER_WORKER = 1 / 6  # loads the built-in cost model on the conversation trace


def main() -> None:
    report: list[dict[str, object]] = []
    table = Table("trace", "workers", "policy", "p99 TTFT s", "tok/s", "utilisation", "recompute", "swap", "real s")
    for name in sys.argv[1:] or sys.exit("bench.simulate: name at least one trace"):
        for num_workers in WORKERS:
            arrivals = read_trace(Path(name), speedup=num_workers * SPEEDUP_PER_WORKER)
            for policy, queue in POLICIES.items():
                began = time.perf_counter()
                result = Simulator(arrivals, CostModel(), num_workers=num_workers, waiting=queue()).run()
                assert all(request.finished is not None for request in result.requests)
                row = {
                    "trace": Path(name).stem,
                    "workers": num_workers,
                    "policy": policy,
                    "p99_ttft": percentiles([request.ttft for request in result.requests])["p99"],
                    "output_tokens_per_second": result.output_tokens_per_second,
                    "utilisation": result.utilisation,
                    "recompute": result.preemptions[PreemptionMode.RECOMPUTE],
                    "swap": result.preemptions[PreemptionMode.SWAP],
                    "real_seconds": time.perf_counter() - began,
                }
                report.append(row)
                table.add_row(*(f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console(file=sys.stdout, width=140).print(table)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
