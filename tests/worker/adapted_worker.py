"""A worker with adapters, stepped by hand."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from stepped_worker import PROMPT, SteppedWorker
from torch import Tensor
from worker_helpers import new_sequence

from pagewire.v1.worker_service_pb2 import TakeAdapterRequest
from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.adapter import WEIGHTS, read_adapter

ROOM = AdapterRoom(num_slots=2, max_rank=64, max_loaded=8)


def random_adapter(shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each projection, by its outputs and inputs."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (0.3 * torch.randn(rank, inputs, generator=draw), 0.3 * torch.randn(outputs, rank, generator=draw))
        for name, (outputs, inputs) in shapes.items()
    }


def adapter_messages(halves: Mapping[str, tuple[Tensor, Tensor]]) -> list[TakeAdapterRequest]:
    """An adapter as a scheduler sends it."""
    names = {f"base_model.model.{name}.lora_": pair for name, pair in halves.items()}
    weights = save({f"{name}{half}.weight": pair[half == "B"] for name, pair in names.items() for half in "AB"})
    config = json.dumps({"peft_type": "LORA", "lora_alpha": len(next(iter(halves.values()))[0])}).encode()
    fingerprint = sha256(sha256(config).digest() + sha256(weights).digest()).hexdigest()
    pieces = [weights[begin : begin + 4096] for begin in range(0, len(weights), 4096)]
    return [
        TakeAdapterRequest(fingerprint=fingerprint, config=config),
        *(TakeAdapterRequest(data=one) for one in pieces),
    ]


def load(adapters: Adapters, path: Path, folder: Path) -> str:
    """Read a received adapter, and hold this rank's part; returns its name."""
    folder.mkdir()
    shutil.copy(path / "adapter_model.safetensors", folder / WEIGHTS)
    config = (path / "adapter_config.json").read_bytes()
    found = read_adapter(config, folder, adapters.shapes, adapters.room.max_rank, adapters.dtype)
    adapters.add(path.name, found.part(adapters.cuts))
    return path.name


def sequence(sequence_id: int, adapter: str, **sampling: Any) -> Any:
    blocks = range(16 * (sequence_id - 1), 16 * sequence_id)
    return replace(new_sequence(sequence_id, PROMPT, blocks, **sampling), adapter=adapter)


def outputs(runner: ModelRunner, adapters: Sequence[str], count: int) -> list[list[int]]:
    """The outputs of one sequence of each adapter after PROMPT, all together, prompts in chunks."""
    worker = SteppedWorker(runner)
    ids = range(1, len(adapters) + 1)
    new = tuple(sequence(number, adapter) for number, adapter in zip(ids, adapters, strict=True))
    worker.step(*((number, 5 + number, False) for number in ids), new_sequences=new)
    found = [
        worker.step(*((number, len(PROMPT) - 5 - number, True) for number in ids)).token_ids,
        *(worker.step(*((number, 1, True) for number in ids)).token_ids for _ in range(count - 1)),
    ]
    return [list(of_one) for of_one in zip(*found, strict=True)]
