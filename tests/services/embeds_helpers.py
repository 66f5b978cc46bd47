"""Prompts of the tiny model whose tokens are replaced by their embeddings."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from scheduler_in_process import InProcess, scheduler
from speculating import FORMED, KINDS, PROMPTS, Plain, Shown, outputs
from torch import Tensor
from worker_in_process import ServedWorker, worker_in_process

from pagewire_client import Client, PromptEmbeds
from pagewire_client.prompts import Part

NOT_OF_TOKENS = ("prompt reported", "penalized")
"""Sampling that depends on the prompt's token ids."""
SPLITS: list[tuple[int, int]] = [(0, 400), (3, 9), (0, 4), (4, 400)]
"""Tokens [start, stop) of a prompt that are given as embeddings."""
Asked = tuple[str, str, tuple[int, int]]
ASKED: list[Asked] = [
    (prompt, kind, SPLITS[number % len(SPLITS)])
    for number, (prompt, kind) in enumerate(product(PROMPTS[:2], KINDS | FORMED))
    if kind not in NOT_OF_TOKENS
]


def embeddings_of(model: Path) -> Tensor:
    """[vocabulary_size, hidden_size]."""
    return load_file(model / "model.safetensors")["model.embed_tokens.weight"]


def with_embeds(token_ids: Sequence[int], table: Tensor, start: int = 0, stop: int = 400) -> list[Part]:
    parts: list[Part] = [token_ids[:start], PromptEmbeds.of(table[list(token_ids[start:stop])]), token_ids[stop:]]
    return [part for part in parts if isinstance(part, PromptEmbeds) or part]


def expected(plain: Plain, asked: Asked) -> list[Shown]:
    """The answer to the prompt's text."""
    prompt, kind, _ = asked
    return plain.answers[[*product(PROMPTS, KINDS | FORMED)].index((prompt, kind))]


async def answers(client: Client, table: Tensor, asked: Sequence[Asked]) -> list[list[Shown]]:
    """The answers to all at once."""
    token_ids = {prompt: await client.tokenize(prompt) for prompt in PROMPTS}
    return await asyncio.gather(
        *(
            outputs(client, with_embeds(token_ids[prompt], table, *split), **(KINDS | FORMED)[kind])
            for prompt, kind, split in asked
        )
    )


@asynccontextmanager
async def serving_embeds(
    model: Path, *, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[InProcess, ServedWorker]]:
    """A worker with these settings, and a scheduler with these options."""
    async with (
        worker_in_process(model, **settings or {}) as worker,
        scheduler(worker.address, model=str(model), **{"enable_prompt_embeds": True} | options) as one,
    ):
        await one.engine.model()
        yield one, worker
