"""Scripts of decodes for a stepped worker, to compare runners."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from stepped_worker import PROMPT, SteppedWorker, make_nan
from torch import Tensor
from worker_helpers import new_sequence, tokens

from worker_service.execution.adapters.adapters import AdapterRoom
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.adapter import Adapter
from worker_service.session.step import BlockTableUpdate, NewSequence

ROOM = AdapterRoom(num_slots=2, max_rank=8, max_loaded=8)
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 20, "seed": 8},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 9},
    {"logprobs": 3},
]


def add_adapter(runner: ModelRunner, name: str, rank: int, seed: int, part: str = "") -> None:
    """A random adapter, only for projections whose names contain `part`."""
    adapters = runner.adapters
    assert adapters is not None
    generator = torch.Generator().manual_seed(seed)

    def half(*shape: int) -> Tensor:
        return (0.3 * torch.randn(*shape, generator=generator)).to(adapters.dtype)

    shapes = {projection: shape for projection, shape in adapters.shapes.items() if part in projection}
    adapters.add(
        name,
        Adapter({name: (half(rank, inputs), half(outputs, rank)) for name, (outputs, inputs) in shapes.items()}),
    )


def new_with(adapter: str, sequence_id: int, prompt: Sequence[int], **sampling: Any) -> NewSequence:
    """A sequence with an adapter, or none, in its own blocks."""
    blocks = range(12 * (sequence_id - 1), 12 * sequence_id)
    return replace(new_sequence(sequence_id, prompt, blocks, **sampling), adapter=adapter)


def generate(worker: SteppedWorker) -> list[list[int]]:
    """Each step's samples while sequences arrive in turn, change places and leave from the middle."""
    live: list[int] = []
    answers = []
    for number in range(10):
        prompt = PROMPT[number : number + 3 + number % 4]
        new = new_sequence(number, prompt, range(4 * number, 4 * number + 4), **SAMPLING[number % len(SAMPLING)])
        answers.append(worker.step((number, len(prompt), True), new_sequences=(new,)).token_ids)
        live.append(number)
        if number % 4 == 3:
            worker.step(finished=(live.pop(1),))
        if number == 7:  # a block table that has changed, with the same length
            cache = worker.runner.cache_engine.device_blocks
            cache[60:64] = cache[28:32]
            cache[28:32] = float("nan")
            worker.step(block_table_updates=(BlockTableUpdate(7, 0, tokens(range(60, 64))),))
        live.reverse()
        answers.append(worker.step(*((sequence_id, 1, True) for sequence_id in live)).token_ids)
    return answers


def generate_with_adapters(worker: SteppedWorker) -> dict[str, list[int]]:
    """The outputs after one prompt with two adapters at a time and without."""
    add_adapter(worker.runner, "a", rank=3, seed=1)
    add_adapter(worker.runner, "b", rank=8, seed=2, part="mlp")
    add_adapter(worker.runner, "c", rank=1, seed=3, part="self_attn")
    adapters = {1: "a", 2: "", 3: "b", 4: "a", 5: "c"}
    said: dict[str, list[int]] = {name: [] for name in ("a", "", "b", "a anew", "c")}

    def begin(*sequence_ids: int) -> None:
        new = tuple(new_with(adapters[number], number, PROMPT[:9]) for number in sequence_ids)
        note(worker.step(*((number, 9, True) for number in sequence_ids), new_sequences=new).token_ids, sequence_ids)

    def decode(*sequence_ids: int) -> None:
        note(worker.step(*((number, 1, True) for number in sequence_ids)).token_ids, sequence_ids)

    def note(token_ids: list[int], sequence_ids: Sequence[int]) -> None:
        for number, token_id in zip(sequence_ids, token_ids, strict=True):
            said[names[number]].append(token_id)

    names = adapters | {4: "a anew"}
    begin(1, 2, 3)
    for _ in range(2):
        decode(1, 2, 3)
        decode(3, 1)
        decode(2)
        decode(2, 3, 1)
        decode(2)
    add_adapter(worker.runner, "a", rank=5, seed=4)  # under the same name, into the slot of the one that goes on
    worker.step(finished=(1,))
    begin(4)
    for _ in range(3):
        decode(4, 2, 3)
    worker.step(finished=(3,))
    begin(5)  # takes the slot of the one that was used least recently
    for _ in range(3):
        decode(5, 4)
        decode(5, 2)
        decode(4)
    return said


@dataclass
class Verified:
    """The results of drafts."""

    without_guesses: dict[int, list[int]]
    """Each sequence's output without drafts."""
    gained: list[dict[int, list[int]]] = field(default_factory=list)
    """Tokens gained in each step."""
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    """Log-probabilities of the sequences that report them."""
    num_guessed: int = 0

    @property
    def num_right(self) -> int:
        return sum(len(of_one) - 1 for step in self.gained for of_one in step.values())


def verify_guesses(worker: SteppedWorker, draw: Random, most: int, num_steps: int = 5) -> Verified:
    """Up to `most` drafts of each sequence, some wrong, beside sequences with adapters."""
    add_adapter(worker.runner, "a", rank=3, seed=1)
    add_adapter(worker.runner, "b", rank=8, seed=2)
    adapters = dict(enumerate(["", "a", "b", "", "a"], 1))

    def begin(worker: SteppedWorker) -> dict[int, list[int]]:
        make_nan(worker.runner.cache_engine.device_blocks)
        new = tuple(
            new_with(adapter, number, PROMPT[: 8 + number], **sampling)
            for (number, adapter), sampling in zip(adapters.items(), SAMPLING, strict=True)
        )
        answer = worker.step(*((number, 8 + number, True) for number in adapters), new_sequences=new)
        return {number: [token_id] for number, token_id in zip(adapters, answer.token_ids, strict=True)}

    alone = SteppedWorker(worker.runner)
    said = begin(alone)
    for _ in range(num_steps * (1 + most)):
        for number, token_id in zip(said, alone.step(*((one, 1, True) for one in said)).token_ids, strict=True):
            said[number].append(token_id)

    verified = Verified(said)
    verified.gained.append(begin(worker))
    places, logprobs = dict.fromkeys(adapters, 1), []
    for _ in range(num_steps):
        guesses = {}
        for number, place in places.items():
            coming = said[number][place : place + draw.randint(0, most)]
            guesses[number] = [token if draw.random() < 0.8 else draw.randrange(131) for token in coming]
        answer = worker.verify(guesses)
        token_ids = iter(answer.token_ids)
        counts = answer.num_tokens or [1] * len(guesses)
        gained = {number: [next(token_ids) for _ in range(n)] for number, n in zip(guesses, counts, strict=True)}
        for number, of_one in gained.items():
            places[number] += len(of_one)
        verified.gained.append(gained)
        verified.num_guessed += sum(map(len, guesses.values()))
        logprobs += [logprob for report in answer.logprobs for logprob in report.logprobs]
    verified.logprobs = torch.tensor(logprobs)
    return verified
