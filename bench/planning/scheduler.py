"""Measures the scheduler's CPU time in microseconds: python -m bench scheduler [PEER]. The last line is JSON:

- `us_per_seq_step`: planning a step and applying its answer, per running sequence, in steady decoding with prefix
  caching. PEER is a Python that can import vllm, whose scheduler is measured in turn
  (`bench/systems/peer_vllm_scheduler.py`) for the ratio `vllm_over_ours`.
- `us_per_step_by_waiting`: a step of 256 sequences while few or many requests wait.
- `us_per_step_by_layer_groups`: a step of 256 sequences whose layers are in one or several groups.
- `us_per_step_by_workers`: planning a step of 32 sequences for a worker that has its own queue, or shares it with 999
  others. The mean over as many steps as fill a block, after as many to warm the processor's caches; the median over
  workers. For `us_per_step_by_workers_cold`, workers run one step in turn, so that the caches contain other workers'
  sequences.
- `codec_us`: encoding a step of 256 sequences, one in 16 with a new block, and decoding its answer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pagewire.v1 import scheduler_output_pb2 as pb
from scheduler_service.core import (
    ModelOutput,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    WaitingQueue,
)
from scheduler_service.core.config import LayerGroup
from scheduler_service.wire.codec import decode_model_output, encode_scheduler_output


@dataclass(frozen=True, slots=True)
class Load:
    """The load for pagewire's and vLLM's scheduler."""

    prompt_tokens: int = 64
    block_size: int = 16
    num_blocks_each: int = 200
    max_num_batched_tokens: int = 2048
    num_steps: int = 400


LOAD = Load()
LAYER_GROUPS = {
    "full": (),
    "full, window of 1,024": (LayerGroup(LOAD.block_size), LayerGroup(LOAD.block_size, 1024)),
    "full, states": (LayerGroup(LOAD.block_size), LayerGroup(0)),
    "full, six groups with states": (LayerGroup(LOAD.block_size), *[LayerGroup(0)] * 6),
}
SIZES = (32, 256, 1024)
NUM_ROUNDS = 5
NUM_WORKERS = 1000
SEQS_A_WORKER = 32
NUM_EARLIER_SEQUENCES = 1_000_000  # Sequence ids are as in a long session: small ids need fewer bytes.
# vLLM must not download files, or write log lines to stdout that could be parsed as answers.
PEER_PROGRAM = Path(__file__).parents[1] / "systems" / "peer_vllm_scheduler.py"
PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
_numbers = count()


class Peer:
    """vLLM's scheduler in a separate process."""

    def __init__(self, python: str) -> None:
        self._failure = f"bench scheduler: {python} could not measure vLLM's scheduler"
        try:
            self._process = subprocess.Popen(
                [python, PEER_PROGRAM, json.dumps(asdict(LOAD))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | PEER_ENVIRONMENT,
            )
        except OSError as error:
            sys.exit(f"{self._failure}: {error}")
        self.version = self._answer()

    def us_of_steps(self, num_seqs: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_seqs}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or sys.exit(self._failure)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def make_scheduler(
    num_seqs: int,
    *,
    queue: WaitingQueue | None = None,
    num_blocks_each: int = LOAD.num_blocks_each,
    layer_groups: tuple[LayerGroup, ...] = (),
) -> Scheduler:
    """`num_seqs` running sequences whose prompts have been computed."""
    config = SchedulerConfig(
        block_size=LOAD.block_size,
        num_device_blocks=num_seqs * num_blocks_each,
        max_num_batched_tokens=max(LOAD.max_num_batched_tokens, num_seqs),
        max_num_seqs=num_seqs,
        max_model_len=1 << 20,
        layer_groups=layer_groups,
    )
    scheduler = Scheduler(config, WaitingQueue() if queue is None else queue)
    add_requests(scheduler, num_seqs)
    while scheduler.get_request_counts()[0] < num_seqs or not all_decoding(scheduler):
        step(scheduler)
    return scheduler


def add_requests(scheduler: Scheduler, how_many: int) -> None:
    sampling = SamplingParams(max_tokens=1 << 19, eos_token_ids=frozenset({2}))
    for number in (next(_numbers) for _ in range(how_many)):
        scheduler.add_request(SequenceGroup(str(number), range(number, number + LOAD.prompt_tokens), sampling))


def all_decoding(scheduler: Scheduler) -> bool:
    return all(s.num_output_tokens > 0 for group in scheduler.running for s in group.sequences)


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    answer = ModelOutput(output.step_id, [7] * sum(scheduled.samples for scheduled in output.scheduled))
    scheduler.update_from_output(output, answer)
    return output


def us_of_steps(scheduler: Scheduler, num_steps: int) -> float:
    """Mean microseconds per step in steady decoding."""
    tokens = [7] * len(scheduler.running)
    began = time.perf_counter()
    for _ in range(num_steps):
        output = scheduler.schedule()
        scheduler.update_from_output(output, ModelOutput(output.step_id, tokens))
    return 1e6 * (time.perf_counter() - began) / num_steps


def fastest(*measures: Callable[[], float]) -> list[float]:
    """The shortest time of each measure over several rounds, in turn: other programs only add time, to all measures."""
    rounds = [[measure() for measure in measures] for _ in range(NUM_ROUNDS)]
    return [min(figures) for figures in zip(*rounds, strict=True)]


def us_per_seq_step(size: int, peer: Peer | None) -> list[float]:
    """Microseconds for each sequence of a step: pagewire's, then vLLM's if `peer` is given."""
    scheduler = make_scheduler(size)
    measures: list[Callable[[], float]] = [lambda: us_of_steps(scheduler, LOAD.num_steps)]
    if peer:
        measures.append(lambda: peer.us_of_steps(size))
    return [cost / size for cost in fastest(*measures)]


def us_per_step_by_waiting() -> dict[int, float]:
    schedulers = {number: make_scheduler(256) for number in (10, 1_000_000)}
    for number, scheduler in schedulers.items():
        add_requests(scheduler, number)
    costs = fastest(*(partial(us_of_steps, scheduler, LOAD.num_steps) for scheduler in schedulers.values()))
    return dict(zip(schedulers, costs, strict=True))


def us_per_step_by_layer_groups() -> dict[str, float]:
    schedulers = {
        name: make_scheduler(256, num_blocks_each=2 * LOAD.num_blocks_each, layer_groups=groups)
        for name, groups in LAYER_GROUPS.items()
    }
    costs = fastest(*(partial(us_of_steps, scheduler, LOAD.num_steps) for scheduler in schedulers.values()))
    return dict(zip(schedulers, costs, strict=True))


def us_per_step_by_workers() -> tuple[dict[int, float], dict[int, float]]:
    """Microseconds per step, by the number of workers that share a queue, with warm and cold caches."""
    queue = WaitingQueue()
    fleets = {
        1: [make_scheduler(SEQS_A_WORKER, num_blocks_each=16) for _ in range(NUM_WORKERS)],
        NUM_WORKERS: [make_scheduler(SEQS_A_WORKER, queue=queue, num_blocks_each=16) for _ in range(NUM_WORKERS)],
    }
    for scheduler in [*fleets[1], fleets[NUM_WORKERS][0]]:
        add_requests(scheduler, 10)  # the worker has no room for these requests, so they wait
    warm: dict[int, list[float]] = {number: [] for number in fleets}
    for pair in zip(*fleets.values(), strict=True):
        for number, scheduler in zip(fleets, pair, strict=True):
            us_of_steps(scheduler, LOAD.block_size)
            warm[number].append(us_of_steps(scheduler, LOAD.block_size))
    cold: dict[int, list[float]] = {number: [] for number in fleets}
    for _ in range(LOAD.block_size):
        for number, fleet in fleets.items():
            cold[number].append(statistics.median(us_of_steps(scheduler, 1) for scheduler in fleet))
    return (
        {number: statistics.median(costs) for number, costs in warm.items()},
        {number: statistics.mean(costs) for number, costs in cold.items()},
    )


def codec_cost() -> tuple[float, int]:
    """Microseconds to encode a step and decode its answer, and the encoded step's bytes."""
    scheduler = make_scheduler(256)
    outputs = [step(scheduler) for _ in range(16)]
    for group in scheduler.running:
        group.sequences[0].id += NUM_EARLIER_SEQUENCES
    for output in outputs:
        output.block_table_updates = [
            update._replace(sequence_id=update.sequence_id + NUM_EARLIER_SEQUENCES)
            for update in output.block_table_updates
        ]
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        for output in outputs:
            encode_scheduler_output(output, 1_700_000_000_000_000_000).SerializeToString()
            answer = pb.ModelOutput(epoch=1, step_id=output.step_id, token_ids=range(1000, 1256)).SerializeToString()
            decode_model_output(pb.ModelOutput.FromString(answer))
        best = min(best, time.perf_counter() - began)
    size = max(len(encode_scheduler_output(o, 1_700_000_000_000_000_000).SerializeToString()) for o in outputs)
    return 1e6 * best / len(outputs), size


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", nargs="?", metavar="PYTHON", help="a Python that can import vllm")
    path = parser.parse_args().peer
    peer = Peer(path) if path else None
    costs = {size: us_per_seq_step(size, peer) for size in SIZES}
    waiting = us_per_step_by_waiting()
    by_layer_groups = us_per_step_by_layer_groups()
    warm, cold = us_per_step_by_workers()
    codec_us, codec_bytes = codec_cost()
    report: dict[str, object] = {
        "us_per_seq_step": {size: cost[0] for size, cost in costs.items()},
        "us_per_step_by_waiting": waiting,
        "us_per_step_by_layer_groups": by_layer_groups,
        "us_per_step_by_workers": warm,
        "us_per_step_by_workers_cold": cold,
        "codec_us": codec_us,
        "codec_bytes": codec_bytes,
    }
    table = Table("microseconds", "ours", *([f"vLLM {peer.version}", "ratio"] if peer else []))
    for size, cost in costs.items():
        compared = [f"{cost[1] / cost[0]:.1f}"] if peer else []
        table.add_row(f"a sequence and step, of {size:,d} running", *(f"{us:.2f}" for us in cost), *compared)
    for number, us in waiting.items():
        table.add_row(f"a step of 256 sequences, {number:,d} requests waiting", f"{us:.1f}")
    for name, us in by_layer_groups.items():
        table.add_row(f"a step of 256 sequences, layers: {name}", f"{us:.1f}")
    for caches, by_workers in (("", warm), (", caches cold", cold)):
        for number, us in by_workers.items():
            worker = "a lone worker" if number == 1 else f"one of {number:,d} workers"
            table.add_row(f"a step of {SEQS_A_WORKER} sequences, {worker}{caches}", f"{us:.1f}")
    table.add_row(f"encode a step of 256 sequences ({codec_bytes:,d} bytes), decode its answer", f"{codec_us:.1f}")
    Console(file=sys.stdout, width=120).print(table)
    if peer:
        peer.close()
        report["vllm_version"] = peer.version
        report["vllm_us_per_seq_step"] = {size: cost[1] for size, cost in costs.items()}
        report["vllm_over_ours"] = {size: cost[1] / cost[0] for size, cost in costs.items()}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
