"""Guesses over real gRPC, by a worker that computes step by step and one that runs ahead: no token depends on them."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from message_helpers import new_message
from served_worker import PROMPT, Client, Service, prompt_step

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import sequence_group_pb2 as group_pb
from worker_service.execution.worker import Worker
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import TOKENS, SchedulerOutput
from worker_service.speculation.drafter import Drafter

NUM_STEPS = 8
MAX = 4
NUM_TOKENS = 1 + NUM_STEPS * (1 + MAX)
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "bad_words": [group_pb.TokenSequence(token_ids=[3])]},
    {"temperature": 0.5, "seed": 9, "logprobs": 2},
]
IDS = range(1, 1 + len(SAMPLING))
REPORTED = 4


class ScriptedDrafter:
    """In place of a drafter: it knows what will come, and says it in some of the room that there is, with mistakes."""

    def __init__(self, coming: list[list[int]], draw: Random, accuracy: float = 0.7) -> None:
        self.coming, self.draw, self.accuracy = coming, draw, accuracy

    def begins(self, _: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        return [chunk.with_drafts(self.guesses(chunk)) for chunk in chunks]

    def guesses(self, chunk: ScheduledChunk) -> "array[int]":
        first = len(chunk.sequence.token_ids) - chunk.sequence.num_prompt_tokens
        number = self.draw.randint(0, len(chunk.drafts))
        coming = self.coming[chunk.sequence.sequence_id - 1][first : first + number]
        return array(TOKENS, [t if self.draw.random() < self.accuracy else self.draw.randrange(131) for t in coming])

    def launched(self, output: SchedulerOutput, seconds: float) -> None:
        pass

    def ends(self, chunks: Sequence[ScheduledChunk], seconds: float) -> list[int]:
        return []


class Verifying:
    """A service whose worker verifies guesses."""

    def __init__(self, service: Service, worker: Worker) -> None:
        self.service, self.worker = service, worker

    def guess(self, drafter: ScriptedDrafter) -> Client:
        """A session in which this guesses."""
        limits = replace(self.worker.limits, num_speculative_tokens=MAX)
        self.service.servicer.set_ready(replace(self.worker, limits=limits, drafter=cast("Drafter", drafter)))
        return self.service.session()


@pytest.fixture
def verifying(service: Service, worker: Worker) -> Verifying:
    return Verifying(service, worker)


async def prompts(client: Client) -> list[list[int]]:
    """The sequences' first tokens."""
    new = [new_message(1 + n, PROMPT, range(16 * n, 16 * (n + 1)), **sampling) for n, sampling in enumerate(SAMPLING)]
    return [[token_id] for token_id in (await client.step(**prompt_step(*new))).token_ids]


Report = tuple[list[int], list[float], int]


def report(answer: pb.ModelOutput) -> list[Report]:
    """Of each token of the sequence that asks: it and the likeliest, their log-probabilities, and its rank."""
    assert {columns.sequence_id for columns in answer.logprobs} <= {REPORTED}
    return [
        (list(columns.token_ids[3 * n : 3 * n + 3]), list(columns.logprobs[3 * n : 3 * n + 3]), rank)
        for columns in answer.logprobs
        for n, rank in enumerate(columns.ranks)
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_guessed_the_tokens_are_those_without_guesses(verifying: Verifying, seed: int) -> None:
    """Steps are sent ahead of the answers that say how many guesses were right."""
    client = verifying.service.session()
    expected, reports, found_reports = await prompts(client), list[Report](), list[Report]()
    for _ in range(NUM_TOKENS - 1):
        answer = await client.step(sequence_ids=IDS)
        reports += report(answer)
        for tokens, token_id in zip(expected, answer.token_ids, strict=True):
            tokens.append(token_id)
    await client.close()

    draw = Random(seed)
    client = verifying.guess(ScriptedDrafter(expected, draw))
    found, num_verified, num_right = await prompts(client), 0, 0
    for _ in range(NUM_STEPS):
        rooms = [draw.randint(0, MAX) for _ in IDS]
        await client.send(sequence_ids=IDS, num_scheduled_tokens=[1 + room for room in rooms], num_draft_tokens=rooms)
    for _ in range(NUM_STEPS):
        answer = cast("pb.ModelOutput", await client.call.read())
        token_ids = iter(answer.token_ids)
        found_reports += report(answer)
        for tokens, number in zip(found, answer.num_tokens or [1] * len(IDS), strict=True):
            tokens += [next(token_ids) for _ in range(number)]
        num_verified += sum(answer.num_draft_tokens)
        num_right += len(answer.token_ids) - len(IDS)
    assert found == [tokens[: len(of_one)] for tokens, of_one in zip(expected, found, strict=True)]
    assert len(found_reports) == len(found[REPORTED - 1]) - 1
    for (token_ids, logprobs, rank), wanted in zip(found_reports, reports, strict=False):
        assert (token_ids, rank) == (wanted[0], wanted[2])
        assert logprobs == pytest.approx(wanted[1], abs=1e-5)
    assert 10 < num_right < num_verified
    await client.close()


async def test_a_row_of_nan_behind_a_guess_costs_what_comes_after_it_alone(
    verifying: Verifying, worker: Worker
) -> None:
    """The token after it is computed again in the next step, which then fails as it would have without guesses."""
    client = verifying.service.session()
    expected = await prompts(client)
    expected[0] += [(await client.step(sequence_ids=[1])).token_ids[0] for _ in range(3)]
    await client.close()

    draw = Random(1)
    draw.randint = lambda _, most: most  # type: ignore[method-assign]
    client = verifying.guess(ScriptedDrafter(expected, draw, accuracy=1.0))
    await prompts(client)
    compute_logits = worker.runner.model.compute_logits  # type: ignore[attr-defined]

    def spoiled(hidden: Any) -> Any:
        logits = compute_logits(hidden)
        if len(logits) > 1:
            logits[2:] = float("nan")
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.runner.model, "compute_logits", spoiled)  # type: ignore[attr-defined]
        answer = await client.step(sequence_ids=[1], num_scheduled_tokens=[4], num_draft_tokens=[3])
    assert list(answer.token_ids) == expected[0][1:3]
    assert list(answer.num_tokens) == [2]
    assert list(answer.num_draft_tokens) == [3]
    assert not answer.failed_sequence_ids
    assert (await client.step(sequence_ids=[1])).token_ids == expected[0][3:]
    await client.close()
