"""Requests for servers with speculation, and their answers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import until
from scheduler_in_process import InProcess, scheduler
from worker_in_process import worker_in_process

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from scheduler_service.engine.workers import Drafts

PROMPTS = ["abcabcabcabc", "one two three one two three one two", "hello", "x" * 40]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.3, "seed": 5},
    "drawn among few": {"temperature": 1.0, "top_k": 3, "top_p": 0.8, "seed": 6},
    "several": {"n": 3, "temperature": 0.4, "seed": 7},
    "penalized": {"temperature": 0, "repetition_penalty": 1.05, "frequency_penalty": 0.05},
    "edited": {"temperature": 0, "logit_bias": {70: 2.0}, "bad_words": ["ab"], "min_tokens": 20},
    "reported": {"temperature": 0, "logprobs": 2},
    "prompt reported": {"temperature": 0, "prompt_logprobs": 1},
    "beams": {"beam_width": 2},
    "stopped": {"temperature": 0, "stop": ["zz", "aaa"]},
    "short": {"temperature": 0, "max_tokens": 3},
}


FORMED: dict[str, dict[str, Any]] = {
    "formed": {"temperature": 0, "regex": "([ab]{3}-[0-9]){30}", "ignore_eos": False},
    "formed and reported": {
        "temperature": 0.8,
        "seed": 8,
        "n": 2,
        "logprobs": 1,
        "grammar": 'start: "[" item ("," item)* "]"\nitem: "true" | "false" | /[0-9]{2}/',
        "ignore_eos": False,
    },
}
ASKED = [(prompt, sampling) for prompt in PROMPTS for sampling in (KINDS | FORMED).values()]
# Beams show their first token at their end.
NO_BEAMS = [(prompt, sampling) for prompt, sampling in ASKED if sampling is not KINDS["beams"]]


@dataclass(frozen=True)
class Plain:
    """Answers of a server without drafts to all of ASKED at once."""

    answers: list["list[Shown]"]
    sequences: list[list[int]]
    """Tokens of each output, with its prompt's."""

    @property
    def without_beams(self) -> list["list[Shown]"]:
        return [answer for answer, asked in zip(self.answers, ASKED, strict=True) if asked in NO_BEAMS]


class Oracle:
    """Drafts in the drafter's place, most of them right; all are verified, faster or not."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences

    def guess(self, token_ids: Any, most: int, *_: int) -> list[int]:
        so_far = token_ids.tolist()
        for sequence in self._sequences:
            if sequence[: len(so_far)] == so_far and (coming := sequence[len(so_far) : len(so_far) + most]):
                if len(so_far) % 3 == 0:
                    coming[-1] ^= 1
                return coming + [5] * (most - len(coming))
        return []


@asynccontextmanager
async def speculating(model: Path, recording: Path | None = None, **settings: Any) -> AsyncIterator[InProcess]:
    """A worker with speculation, and a scheduler."""
    async with (
        worker_in_process(model, **{"speculative_config": {"method": "ngram"}, "forms": True} | settings) as worker,
        scheduler(worker.address, model=str(model), preemption_mode="swap", record=recording) as one,
    ):
        await one.engine.model()
        yield one


Shown = tuple[list[int], str, Any, list[list[int]]]


async def outputs(client: Client, prompt: str, **sampling: Any) -> list[Shown]:
    """Tokens, text, finish reason, and likeliest tokens; probabilities may differ in their last bits."""
    completion = await collect(client, prompt, SamplingParams(**{"max_tokens": 48, "ignore_eos": True} | sampling))
    return [
        (
            output.token_ids,
            output.text,
            output.finish_reason,
            [[top.token_id for top in position.top] for position in output.logprobs],
        )
        for output in completion.outputs
    ]


async def answers_of(target: str) -> Plain:
    """This server's answers to all of ASKED at once."""
    async with Client(target) as client:
        answers = await asyncio.gather(*(outputs(client, prompt, **sampling) for prompt, sampling in ASKED))
        prompts = [await client.tokenize(prompt) for prompt, _ in ASKED]
    pairs = zip(prompts, answers, strict=True)
    return Plain(answers, [prompt + token_ids for prompt, answer in pairs for token_ids, *_ in answer])


async def guesses_alone_and_together(
    one: InProcess, expected: Sequence[tuple[tuple[str, dict[str, Any]], list[Shown]]], num_alone: int
) -> Drafts:
    """The only worker's drafts: the first requests alone, then all at once, with the expected outputs."""
    async with Client(one.target) as client:
        for (prompt, sampling), wanted in expected[:num_alone]:
            assert await outputs(client, prompt, **sampling) == wanted
        together = await asyncio.gather(*(outputs(client, prompt, **sampling) for (prompt, sampling), _ in expected))
    assert together == [wanted for _, wanted in expected]
    return one.engine.workers.all[0].drafts


def num_preemptions(one: InProcess) -> int:
    (worker,) = one.engine.workers.all
    assert worker.scheduler is not None
    return sum(worker.scheduler.num_preemptions.values())


async def guesses_after_a_loss(expected: list[list[Shown]], model: Path, **settings: Any) -> Drafts:
    """The remaining worker's drafts after the loss of one of two, with the expected outputs."""
    async with (
        worker_in_process(model, forms=True, **settings) as first,
        worker_in_process(model, forms=True, **settings) as second,
        scheduler(first.address, second.address, model=str(model)) as one,
    ):
        await one.engine.model()
        await until(lambda: len(one.engine.workers.serving) == 2)
        lost, other = one.engine.workers.all
        async with Client(one.target) as client:
            together = [asyncio.create_task(outputs(client, prompt, **sampling)) for prompt, sampling in NO_BEAMS]
            await until(lambda: lost.drafts.verified.num_tokens > 20)
            await first.server.server.stop(None)
            assert await asyncio.gather(*together) == expected
        assert lost.num_losses == 1
        return other.drafts
