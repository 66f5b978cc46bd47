"""Guesses over real gRPC, by a worker that computes step by step and one that runs ahead: no token depends on them."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from message_helpers import new_message
from served_worker import PROMPT, Client, Service, prompt_step

from pagewire.v1 import scheduler_output_pb2 as pb
from worker_service.execution.worker import Worker

NUM_TOKENS = 24
MOST = 4
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "bad_words": [pb.TokenSequence(token_ids=[3])]},
    {"temperature": 0.5, "seed": 9, "logprobs": 2},
]
IDS = range(1, 1 + len(SAMPLING))
REPORTED = 4


@pytest.fixture
def verifying(service: Service, worker: Worker) -> Service:
    service.servicer.set_ready(replace(worker, limits=replace(worker.limits, num_speculative_tokens=MOST)))
    return service


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
async def test_whatever_is_guessed_the_tokens_are_those_without_guesses(verifying: Service, seed: int) -> None:
    client = verifying.session()
    expected, reports, found_reports = await prompts(client), list[Report](), list[Report]()
    for _ in range(NUM_TOKENS + MOST):
        answer = await client.step(sequence_ids=IDS)
        reports += report(answer)
        for tokens, token_id in zip(expected, answer.token_ids, strict=True):
            tokens.append(token_id)
    await client.close()

    client, draw = verifying.session(), Random(seed)
    found, num_steps, num_right = await prompts(client), 0, 0
    while any(len(tokens) < NUM_TOKENS for tokens in found):
        drafts: dict[int, list[int]] = {}
        for sequence_id, tokens in enumerate(found, 1):
            if number := draw.randrange(MOST + 1):
                coming = expected[sequence_id - 1][len(tokens) : len(tokens) + number]
                drafts[sequence_id] = [t if draw.random() < 0.7 else draw.randrange(131) for t in coming or [5]]
        due = [sequence_id for sequence_id, tokens in enumerate(found, 1) if len(tokens) < NUM_TOKENS]
        drafts = {sequence_id: drafts[sequence_id] for sequence_id in due if sequence_id in drafts}
        answer = await client.step(
            sequence_ids=due,
            num_scheduled_tokens=[1 + len(drafts.get(sequence_id, ())) for sequence_id in due],
            draft_tokens=[pb.DraftTokens(sequence_id=number, token_ids=tokens) for number, tokens in drafts.items()],
        )
        token_ids = iter(answer.token_ids)
        found_reports += report(answer)
        for sequence_id, number in zip(due, answer.num_tokens or [1] * len(due), strict=True):
            gained = [next(token_ids) for _ in range(number)]
            assert gained[:-1] == drafts.get(sequence_id, [])[: number - 1]
            found[sequence_id - 1] += gained
            num_right += number - 1
        num_steps += 1
    assert [tokens[:NUM_TOKENS] for tokens in found] == [tokens[:NUM_TOKENS] for tokens in expected]
    assert len(found_reports) == len(found[REPORTED - 1]) - 1
    for (token_ids, logprobs, rank), wanted in zip(found_reports, reports, strict=False):
        assert (token_ids, rank) == (wanted[0], wanted[2])
        assert logprobs == pytest.approx(wanted[1], abs=1e-5)
    assert num_right > 10
    assert num_steps < NUM_TOKENS
    await client.close()


async def test_a_row_of_nan_behind_a_guess_costs_what_comes_after_it_alone(verifying: Service, worker: Worker) -> None:
    """The token after it is computed again in the next step, which then fails as it would have without guesses."""
    client = verifying.session()
    await prompts(client)
    plain = [(await client.step(sequence_ids=[1])).token_ids[0] for _ in range(3)]
    await client.close()

    client = verifying.session()
    await prompts(client)
    compute_logits = worker.runner.model.compute_logits

    def spoiled(hidden: Any) -> Any:
        logits = compute_logits(hidden)
        if len(logits) > 1:
            logits[2:] = float("nan")
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.runner.model, "compute_logits", spoiled)
        drafts = [pb.DraftTokens(sequence_id=1, token_ids=plain)]
        answer = await client.step(sequence_ids=[1], num_scheduled_tokens=[4], draft_tokens=drafts)
    assert list(answer.token_ids) == plain[:2]
    assert list(answer.num_tokens) == [2]
    assert not answer.failed_sequence_ids
    assert (await client.step(sequence_ids=[1])).token_ids == plain[2:]
    await client.close()
