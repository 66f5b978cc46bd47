"""Vectors of texts as transformers computes them, and workers and schedulers for vectors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from engines import until
from scheduler_in_process import InProcess, scheduler
from torch import Tensor
from torch.nn import functional
from worker_in_process import ServedWorker, slow_down, worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, Embedding

T = TypeVar("T")

TEXTS = ["hello", "a", "one two three one two three", "x" * 40, "héllo wörld", "the quick brown fox", "ab" * 15]


class SlowEncoder:
    """A checkpoint's body as transformers computes it, a text at a time."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._network = AutoModel.from_pretrained(path, attn_implementation="eager").eval()

    def states(self, text: str) -> Tensor:
        token_ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            found: Tensor = self._network(input_ids=token_ids).last_hidden_state[0]
        return found

    def vectors(
        self, text: str, pooling: pb.Pooling = pb.POOLING_MEAN, dimensions: int | None = None, *, normalize: bool = True
    ) -> Tensor:
        """[vectors, dimensions]"""
        states = self.states(text)
        pooled = {
            pb.POOLING_CLS: states[:1],
            pb.POOLING_LAST: states[-1:],
            pb.POOLING_MEAN: states.mean(0, keepdim=True),
            pb.POOLING_ALL: states,
        }[pooling][:, :dimensions]
        return functional.normalize(pooled, dim=1) if normalize else pooled


def tensor(embedding: Embedding) -> Tensor:
    """[vectors, dimensions]"""
    return torch.tensor([list(vector) for vector in embedding.vectors])


def assert_close(found: Sequence[Embedding], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor(one), other, rtol=1e-5, atol=1e-5)


@asynccontextmanager
async def serving(
    model: Path, scheduler_settings: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[InProcess, ServedWorker]]:
    """A worker and a scheduler that checks all blocks after every step."""
    async with (
        worker_in_process(model, **settings) as worker,
        scheduler(worker.address, model=str(model), check_invariants=True, **scheduler_settings or {}) as one,
    ):
        await until(lambda: one.engine.workers.admits)
        await one.link.model()
        yield one, worker


async def said_through_a_loss(model: Path, say: Callable[[Client], Awaitable[T]], **settings: Any) -> T:
    """The answers of calls on two slow workers, one of which is lost midway."""
    async with worker_in_process(model, **settings) as first, worker_in_process(model, **settings) as second:
        slow_down(first, 0.02)
        slow_down(second, 0.02)
        async with (
            scheduler(first.address, second.address, model=str(model), check_invariants=True) as one,
            Client(one.target) as client,
        ):
            await until(lambda: one.engine.workers.admits)
            said = asyncio.ensure_future(say(client))
            (lost,) = (worker for worker in one.engine.workers.all if worker.client.address == first.address)
            await until(lambda: lost.scheduler and lost.scheduler.running)
            await first.server.server.stop(None)
            found = await said
            await assert_nothing_is_left(one)
            return found


def encoder_settings() -> dict[str, Any]:
    """For workers without a cache."""
    return {"num_gpu_blocks_override": None, "swap_space": 0, "max_num_batched_tokens": 128}


async def assert_nothing_is_left(one: Any) -> None:
    await until(lambda: not one.engine.requests.in_flight and not one.engine.requests.admission.being_checked)
    await until(lambda: not one.engine.requests.admission.num_bytes)
    assert not one.link.requests.by_call
    assert not len(one.engine.requests.waiting)
    for worker in one.engine.workers.all:
        await until(lambda worker=worker: worker.scheduler is None or not worker.scheduler.running)
