"""Simulates traces with the real scheduler on a virtual clock: python -m bench simulate TRACE.csv …

Each trace runs with 1, 8 and 1,000 workers under every policy, so fast that requests wait. One tenant, at random, sends
80% of the requests, four light tenants 5% each; 10% of every tenant's are urgent. The first table lists:

- the p99 of the time to first token (TTFT) in seconds, of all, the light tenants' and urgent requests;
- the service gap: the largest difference between two waiting tenants' services, in thousands of tokens
  (`scheduler_service/simulation/fairness.py`);
- the number of preemptions in each mode.

The second table compares pagewire's balancer with "first come", where the worker that plans first takes all requests
for which it has room, on 8 workers: one of them four times as slow, turns of conversations, or four branches of a
conversation at once, as agents send them.

The third table shows how a limit on a long prompt's tokens in a step improves latency. One worker receives the trace's
requests of up to 512 prompt tokens, and every 400 seconds long prompts that fill a hundred steps. It lists the TTFT of
the short requests that arrived meanwhile.

One simulation runs on each core at a time, so real times depend on the others. The last line is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from scheduler_service.core import Balancer, PreemptionMode, WaitingQueue
from scheduler_service.core.config import default_prefill_chunk
from scheduler_service.core.placement.worker import Member
from scheduler_service.policies import POLICIES, waiting_queue
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.senders import converse, deal
from scheduler_service.simulation.simulator import RequestTimes, Simulator
from scheduler_service.simulation.summary import percentiles, ttft
from scheduler_service.simulation.trace import Arrival, read_trace

# Factors on a trace's arrival rate, by number of workers. 1/6 for each keeps workers with the built-in cost model busy.
# For a thousand, an hour is compressed to seven seconds, because otherwise no request waits.
SPEEDUPS = {1: 1 / 6, 8: 8 / 6, 1000: 500.0}
HEAVY = "heavy"
TENANTS = {HEAVY: 0.8, "light 1": 0.05, "light 2": 0.05, "light 3": 0.05, "light 4": 0.05}
URGENT = -100  # so urgent that ageing never makes another request more urgent
PRIORITIES = {0: 0.9, URGENT: 0.1}

# With 0.8, several workers have room most of the time; otherwise placement would have no choice.
PLACEMENT_SPEEDUP = 0.8
PLACEMENT_REQUESTS = 6_000
SLOWNESS = {7: 4.0}
NUM_BRANCHES = 4

SHORT = 512
LONG_STEPS = 100
LONG_EVERY = 400.0
SHORT_SPEEDUP = 0.05
SHORT_REQUESTS = 1_000

Row = dict[str, str | int | float]


class FirstCome(Balancer):
    """The worker that plans first takes all requests for which it has room."""

    def has_others(self, member: Member) -> bool:  # noqa: ARG002
        return False


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


def run_placement(case: tuple[str, str, bool]) -> Row:
    trace, load, is_placed = case
    arrivals = read_trace(Path(trace), speedup=PLACEMENT_SPEEDUP, limit=PLACEMENT_REQUESTS)
    if load != "a slow worker":
        arrivals = converse(arrivals, pause=30.0, most_turns=8)
    if load == "branches":  # branches replace other requests, so that the number of requests does not change
        arrivals = [arrival for arrival in arrivals[::NUM_BRANCHES] for _ in range(NUM_BRANCHES)]
    waiting = WaitingQueue()
    waiting.balancer = Balancer() if is_placed else FirstCome()
    slowness = SLOWNESS if load == "a slow worker" else None
    result = Simulator(arrivals, CostModel(), num_workers=8, waiting=waiting, slowness=slowness).run()
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    return {
        "trace": Path(trace).stem,
        "load": load,
        "placement": "balancer" if is_placed else "first come",
        "p50_ttft": ttft(result.requests)["p50"],
        "p99_ttft": ttft(result.requests)["p99"],
        "p99_e2e": percentiles([request.e2e for request in result.requests])["p99"],
        "cached": result.cached_tokens / prompt_tokens,
        "overtakes": waiting.balancer.num_overtakes,
    }


def run_beside(case: tuple[str, int, bool]) -> Row:
    trace, num_long, is_capped = case
    costs = replace(CostModel(), num_device_blocks=2**15)  # enough blocks for the long prompts
    step = costs.max_num_batched_tokens
    chunk = default_prefill_chunk(step) if is_capped else step
    arrivals = read_trace(Path(trace), speedup=SHORT_SPEEDUP)
    arrivals = [arrival for arrival in arrivals if arrival.prompt_tokens <= SHORT][:SHORT_REQUESTS]
    num_tokens = LONG_STEPS * step // num_long
    for number in range(int(arrivals[-1].at / LONG_EVERY)):
        arrivals += [Arrival(LONG_EVERY * number, num_tokens, 1)] * num_long
    arrivals.sort(key=lambda arrival: arrival.at)
    requests = Simulator(arrivals, costs, num_workers=1, max_prefill_chunk=chunk).run().requests
    long = [request for request in requests if request.arrival.prompt_tokens > SHORT]
    spans = [(request.arrived, request.arrived + request.ttft) for request in long]
    beside = [
        request
        for request in requests
        if request.arrival.prompt_tokens <= SHORT and any(begin <= request.arrived < end for begin, end in spans)
    ]
    return {
        "trace": Path(trace).stem,
        "long": f"{num_long} x {num_tokens:,}",
        "chunk": f"{chunk:,}",
        "num_short": len(beside),
        "p50_ttft": ttft(beside)["p50"],
        "p99_ttft": ttft(beside)["p99"],
        "mean_ttft_long": sum(request.ttft for request in long) / len(long),
    }


BESIDE_COLUMNS = {
    "trace": "{trace}",
    "long prompts": "{long}",
    "most of a step": "{chunk}",
    "short requests": "{num_short:,}",
    "p50 TTFT": "{p50_ttft:.2f}",
    "p99 TTFT": "{p99_ttft:.2f}",
    "mean TTFT of the long": "{mean_ttft_long:.1f}",
}
PLACEMENT_COLUMNS = {
    "trace": "{trace}",
    "load": "{load}",
    "placement": "{placement}",
    "p50 TTFT": "{p50_ttft:.2f}",
    "p99 TTFT": "{p99_ttft:.2f}",
    "p99 end to end": "{p99_e2e:.1f}",
    "prompt tokens cached": "{cached:.1%}",
    "overtakes": "{overtakes:,}",
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


def table_of(report: list[Row], columns: dict[str, str], last: str) -> Table:
    """A separator follows each row in which a value equals `last`."""
    table = Table()
    for heading in columns:
        is_name = heading in ("trace", "policy", "load", "placement")
        table.add_column(heading, justify="left" if is_name else "right")
    for row in report:
        table.add_row(*(cell.format(**row) for cell in columns.values()), end_section=last in row.values())
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="CSV")
    traces = parser.parse_args().traces
    cases = list(product(traces, SPEEDUPS, POLICIES))
    placement_cases = list(product(traces, ("a slow worker", "conversations", "branches"), (False, True)))
    console = Console(stderr=True)
    beside_cases = list(product(traces, (1, 4, 8), (False, True)))
    with ProcessPoolExecutor() as pool:
        policies = list(track(pool.map(run, cases), total=len(cases), console=console))
        placement = list(track(pool.map(run_placement, placement_cases), total=len(placement_cases), console=console))
        beside = list(track(pool.map(run_beside, beside_cases), total=len(beside_cases), console=console))
    capped = f"{default_prefill_chunk(CostModel().max_num_batched_tokens):,}"
    for rows, columns, last in (
        (policies, COLUMNS, "fair"),
        (placement, PLACEMENT_COLUMNS, "balancer"),
        (beside, BESIDE_COLUMNS, capped),
    ):
        Console(file=sys.stdout, width=150).print(table_of(rows, columns, last))
    sys.stdout.write(json.dumps({"policies": policies, "placement": placement, "beside": beside}) + "\n")


if __name__ == "__main__":
    main()
