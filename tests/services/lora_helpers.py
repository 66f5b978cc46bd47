"""Adapters of the tiny model, a worker and a scheduler with them, and their outputs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import until
from scheduler_in_process import InProcess, scheduler
from worker_in_process import ServedWorker, worker_in_process

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect

PROMPTS = ["abcabcabcabc", "x" * 40]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "seed": 5},
    "several": {"n": 3, "temperature": 0.6, "seed": 7},
    "penalized": {"temperature": 0, "repetition_penalty": 1.05},
    "reported": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "beams": {"beam_width": 2, "n": 2},
}


@asynccontextmanager
async def serving(
    model: Path, lora_dir: Path, recording: Path | None = None, *, time_limit: float = 60, **settings: Any
) -> AsyncIterator[tuple[InProcess, ServedWorker]]:
    """A worker of four slots, and a scheduler."""
    async with (
        worker_in_process(model, **{"max_loras": 4} | settings) as worker,
        scheduler(
            worker.address,
            time_limit=time_limit,
            model=str(model),
            lora_dir=lora_dir,
            preemption_mode="swap",
            record=recording,
        ) as one,
    ):
        await until(lambda: one.engine.workers.admits)
        yield one, worker


Shown = list[tuple[list[int], str, list[list[int]]]]


async def outputs(client: Client, prompt: str, lora_name: str, **sampling: Any) -> Shown:
    """Tokens, text, and the likeliest tokens."""
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True} | sampling)
    completion = await collect(client, prompt, params, lora_name=lora_name)
    return [
        (output.token_ids, output.text, [[top.token_id for top in position.top] for position in output.logprobs])
        for output in completion.outputs
    ]


Asked = tuple[str, str, dict[str, Any]]
NAMES = ("", "one", "two", "three")
ASKED: list[Asked] = list(product(PROMPTS, NAMES, KINDS.values()))


async def all_together(client: Client, asked: list[Asked]) -> list[Shown]:
    return await asyncio.gather(*(outputs(client, prompt, name, **sampling) for prompt, name, sampling in asked))


async def refusal(client: Client, lora_name: str, **about: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(client, "a", SamplingParams(max_tokens=1), lora_name=lora_name, **about)
    return error.value.code(), str(error.value.details())


LONG = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0)
