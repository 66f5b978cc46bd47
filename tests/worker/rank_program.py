"""The program of both ranks in `test_ranks`: the same steps on every checkpoint, with results saved by rank.

With a GPU for each they compute there and replay graphs; with one, they share it and sum over Gloo.

`python rank_program.py JOBS FOLDER` starts the ranks; JOBS is a JSON object of `Job`s by name.
"""

import json
import os
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from adapted_worker import ROOM, load, outputs
from stepped_worker import PROMPT, SteppedWorker, load_runner
from worker_helpers import new_sequence, tokens

from worker_service.execution.startup.network import NO_ADAPTERS
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.models.layers.linear import Quantization
from worker_service.parallel import is_rank
from worker_service.parallel.ranks import ALONE, Ranks, join_ranks
from worker_service.serving.launcher import launch
from worker_service.session.step import BlockMapping, BlockTableUpdate, Fork

NUM_RANKS = 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """A checkpoint, and how to load it."""

    path: str
    dtype: str = "float32"
    quantization: Quantization = "none"
    adapters: Sequence[str] = ()
    """Folders of three."""

    def run(self, ranks: Ranks = ALONE) -> dict[str, Any]:
        """`logprobs` [positions, vocabulary_size], `token_ids`, and in `adapted` the outputs of each adapter and the
        base.
        """
        room = ROOM if self.adapters else NO_ADAPTERS
        dtype = getattr(torch, self.dtype)
        runner = load_runner(Path(self.path), _has_gpu_each(), dtype, self.quantization, ranks, room)
        logprobs = SteppedWorker(runner).prompt_logprobs([5, 1, 17, 13])
        results = {"logprobs": logprobs, "token_ids": _generate(runner)}
        return results | {"adapted": _adapted(runner, self.adapters)} if self.adapters else results


def run_in_ranks(jobs: dict[str, Job], folder: Path) -> list[str]:
    """The command that runs the jobs in all ranks."""
    file = folder / "jobs.json"
    file.write_text(json.dumps({name: asdict(job) for name, job in jobs.items()}))
    return [sys.executable, __file__, str(file), str(folder)]


def _generate(runner: ModelRunner) -> list[list[int]]:
    """Two sequences, one sampled, with chunks, a fork that copies on write, and swapping."""
    runner.cache_engine.device_blocks.fill_(float("nan"))
    worker = SteppedWorker(runner)
    found = [worker.step((1, 30, False), new_sequences=(new_sequence(1, PROMPT, range(13)),)).token_ids]
    drawn = new_sequence(2, PROMPT[:20], range(20, 30), temperature=1.0, top_p=0.9, seed=7)
    found.append(worker.step((1, 7, True), (2, 11, False), new_sequences=(drawn,)).token_ids)
    found += (worker.step((1, 1, True), (2, 9 if number == 0 else 1, True)).token_ids for number in range(4))

    # The fork shares the full blocks of the sampled sequence, and copies the last.
    known = list(worker.session.sequences[2].token_ids)
    held = -(-(len(known) - 1) // 4)
    fork = Fork(2, 3, len(known), len(known) - 1, tokens([*range(20, 19 + held), 40, 41, 42]), 1, array("q"))
    copied = BlockMapping((19 + held,), (40,))
    found.append(worker.step((3, 1, True), (2, 1, True), forks=(fork,), blocks_to_copy=copied).token_ids)
    found += (worker.step((2, 1, True), (3, 1, True), (1, 1, True)).token_ids for _ in range(2))

    worker.step(blocks_to_swap_out=BlockMapping(tuple(range(8)), tuple(range(8))))
    runner.cache_engine.device_blocks[:8] = float("nan")
    found.append(
        worker.step(
            (1, 1, True),
            blocks_to_swap_in=BlockMapping(tuple(range(8)), tuple(range(50, 58))),
            block_table_updates=(BlockTableUpdate(1, 0, tokens([*range(50, 58), *range(8, 13)])),),
        ).token_ids
    )
    found += (worker.step((1, 1, True), (3, 1, True)).token_ids for _ in range(3))
    return found


def _adapted(runner: ModelRunner, folders: Sequence[str]) -> list[list[int]]:
    """Two adapters and the base in one step, then one without a slot yet, then one loaded anew."""
    assert runner.adapters is not None
    with TemporaryDirectory() as folder:
        first, second, third = (load(runner.adapters, Path(path), Path(folder) / Path(path).name) for path in folders)
        found = outputs(runner, [first, "", second], 6)
        (said, again) = outputs(runner, [third, second], 6)
        assert again == found[2]
        runner.adapters.remove(first)
        load(runner.adapters, Path(folders[0]), Path(folder) / "anew")
        assert outputs(runner, [first], 6) == found[:1]
    return [found[0], found[2], said, found[1]]


def _has_gpu_each() -> bool:
    return torch.cuda.device_count() >= NUM_RANKS


def _run_rank(jobs: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(NUM_RANKS, torch.device("cuda", int(os.environ["RANK"])) if _has_gpu_each() else CPU)
    results = {name: Job(**job).run(ranks) for name, job in json.loads(jobs.read_text()).items()}
    torch.save(results, folder / f"{ranks.rank}.pt")
    ranks.gather_numbers(0)  # until all have saved theirs: the first ends the others with it
    os._exit(0)  # as a worker's rank does: torch's own clean-up has ended with "terminate called", once in 30 runs


if __name__ == "__main__":
    if not is_rank():
        sys.exit(launch([sys.executable, *sys.argv], NUM_RANKS))
    _run_rank(Path(sys.argv[1]), Path(sys.argv[2]))
