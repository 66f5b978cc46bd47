"""The log-probabilities of a prompt on a CPU worker with a folder's weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from worker_helpers import tokens

from worker_service.execution.worker import load_worker
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import SamplingParams, SchedulerOutput
from worker_service.settings import WorkerSettings


def prompt_logprobs(settings: WorkerSettings) -> Tensor:
    """The prompt's tokens except the first."""
    prompt, worker = tokens(range(3, 40)), load_worker(settings)
    tables = [tokens(range(number, 40, 2)) for number in range(2)]
    table, *further = tables if worker.limits.layer_groups else [tokens(range(len(prompt)))]
    sequence = SequenceState(
        sequence_id=1,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=table,
        sampling=SamplingParams(prompt_logprobs=0),
        further_tables=tuple(further),
    )
    chunk = ScheduledChunk(sequence, start=0, stop=len(prompt) - 1, samples=False)
    (report,) = worker.runner.execute(SchedulerOutput(epoch=0, step_id=0), [chunk]).prompt_logprobs
    return torch.tensor(report.logprobs)


def worker_settings(path: Path, quantization: str = "none", **settings: Any) -> WorkerSettings:
    sizes: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_gpu_blocks_override": 40}
    return WorkerSettings(**{"model": str(path), "quantization": quantization} | sizes | settings)
