"""Offline batches: a list of prompts in, a list of completions out, in the same order."""

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.client import RETRY_SECONDS, Client, Prompt, Text
from pagewire_client.embedding import Embedding
from pagewire_client.local import LocalServer

MAX_IN_FLIGHT = 512

T = TypeVar("T")


@dataclass(slots=True)
class Output:
    """One of the n outputs of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Completion:
    """A prompt and its outputs."""

    prompt: Prompt
    outputs: list[Output]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    metrics: pb.RequestMetrics = field(default_factory=pb.RequestMetrics)


class LLM:
    """Generates for batches of prompts, on a server that runs already (`target`) or on one of its own.

    Its own server holds `model`, loads when the LLM is made and stops with `close`, with the `with` block, or when
    the LLM is collected. Raises ServerError when it does not start.
    """

    def __init__(
        self, model: str = "default", *, target: str | None = None, worker_arguments: Sequence[str] = ()
    ) -> None:
        self._server = None if target else LocalServer(model, worker_arguments=worker_arguments)
        self.target = self._server.target if self._server else str(target)
        self._stop = weakref.finalize(self, self._server.stop) if self._server else None

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: pb.SamplingParams | Sequence[pb.SamplingParams] | None = None,
        *,
        lora_name: str = "",
        progress: bool = True,
    ) -> list[Completion]:
        """Complete every prompt; a single text is a batch of one. `sampling` is for all, or one for each. `lora_name`
        is a low-rank adapter for all.

        Raises ValueError when prompts and parameters differ in number, and grpc.aio.AioRpcError with the server's
        sentence for the first prompt it refuses.
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = (
            [sampling] * len(batch) if sampling is None or isinstance(sampling, pb.SamplingParams) else list(sampling)
        )
        if len(each) != len(batch):
            raise ValueError(f"there are {len(batch)} prompts and {len(each)} sampling parameters")
        # On a thread of its own, because a notebook has an event loop running on this one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._generate(batch, each, lora_name, progress)).result()

    async def _generate(
        self, batch: list[Prompt], each: Sequence[pb.SamplingParams | None], lora_name: str, progress: bool
    ) -> list[Completion]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("prompts", total=len(batch))

            async def one(prompt: Prompt, sampling: pb.SamplingParams | None) -> Completion:
                async with slots:
                    completion = await collect(client, prompt, sampling, lora_name=lora_name)
                bar.advance(task)
                return completion

            # A server of its own is not restarted, so a retry would wait for nothing.
            async with Client(self.target, retry_for=0 if self._server else RETRY_SECONDS) as client:
                return await asyncio.gather(*(one(p, s) for p, s in zip(batch, each, strict=True)))

    def embed(self, texts: Sequence[Text], **options: Any) -> list[Embedding]:
        """The vectors of texts; `options` are those of `Client.embed`."""
        return self._ask(lambda client: client.embed(texts, **options))

    def score(self, query: str, documents: Sequence[str], **options: Any) -> list[tuple[int, float]]:
        """Documents by their places, the best answer first; `options` are those of `Client.score`."""
        return self._ask(lambda client: client.score(query, documents, **options))

    def _ask(self, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        async def ask() -> T:
            async with Client(self.target, retry_for=0 if self._server else RETRY_SECONDS) as client:
                return await question(client)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask()).result()

    def close(self) -> None:
        """Stop the LLM's own server."""
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def collect(
    client: Client, prompt: Prompt, sampling: pb.SamplingParams | None = None, *, lora_name: str = ""
) -> Completion:
    """Read one stream to its end."""
    completion = Completion(prompt, [Output() for _ in range(sampling.n or 1 if sampling else 1)])
    async for response in client.generate(prompt, sampling, lora_name=lora_name):
        output = completion.outputs[response.index]
        output.text += response.text
        output.token_ids += response.token_ids
        output.logprobs += response.logprobs
        completion.prompt_logprobs += response.prompt_logprobs
        if response.finish_reason:
            output.finish_reason = response.finish_reason
            reason = response.WhichOneof("stop_reason")
            output.stop_reason = getattr(response, reason) if reason else None
            completion.prompt_tokens = response.usage.prompt_tokens
            completion.cached_tokens = response.usage.cached_tokens
        if response.HasField("metrics"):
            completion.metrics = response.metrics
    return completion
