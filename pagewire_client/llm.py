"""Offline batches: a list of prompts in, a list of completions in the same order out."""

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.client import RETRY_SECONDS, Client
from pagewire_client.embedding import Embedding
from pagewire_client.local import LocalServer
from pagewire_client.prompts import Prompt, Text

MAX_IN_FLIGHT = 512

T = TypeVar("T")


@dataclass(slots=True)
class Output:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    stop_reason: str | int | None = None
    error: str = ""
    """The error's message with FINISH_REASON_ERROR. Other outputs are not affected."""


@dataclass(slots=True)
class Completion:
    prompt: Prompt
    outputs: list[Output]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    metrics: pb.RequestMetrics = field(default_factory=pb.RequestMetrics)


class LLM:
    """Generates for batches of prompts, on a running server (`target`) or on a server that the LLM starts.

    The started server stops with `close`, at the end of the `with` block, or when the LLM is garbage-collected.
    `worker_arguments` and `scheduler_arguments` are further flags, such as ["--scheduling-policy", "priority"]. Raises
    ServerError if the server does not start, and ValueError if arguments for a target and for a server are mixed.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        target: str | None = None,
        worker_arguments: Sequence[str] = (),
        scheduler_arguments: Sequence[str] = (),
        api_key: str = "",
        tls: Path | None = None,
    ) -> None:
        own = {"model": model, "worker_arguments": worker_arguments, "scheduler_arguments": scheduler_arguments}
        others: dict[str, object] = {"api_key": api_key, "tls": tls}
        if target:
            _refuse(own, "is for a server that the LLM starts, but target names a running server")
        else:
            _refuse(others, "needs a target")
        self._server = (
            None
            if target
            else LocalServer(
                model or "default", worker_arguments=worker_arguments, scheduler_arguments=scheduler_arguments
            )
        )
        self.target = self._server.target if self._server else str(target)
        self._stop = weakref.finalize(self, self._server.stop) if self._server else None
        self._access: dict[str, Any] = others

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: pb.SamplingParams | Sequence[pb.SamplingParams] | None = None,
        *,
        lora_name: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str] = "",
        tenant: str = "",
        parse_special_tokens: bool = False,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete every prompt. A single text is a batch of one.

        `sampling`, `lora_name`, `priority` and `cache_salt` are one value for all prompts, or a list with one for each:
        see `Client.generate`. Raises ValueError if numbers differ, and grpc.aio.AioRpcError for the first refused
        prompt.
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        columns = {
            "sampling": _for_each(batch, sampling, pb.SamplingParams, "sampling parameters"),
            "lora_name": _for_each(batch, lora_name, str, "adapters in lora_name"),
            "priority": _for_each(batch, priority, int, "priorities"),
            "cache_salt": _for_each(batch, cache_salt, str, "salts in cache_salt"),
            "tenant": [tenant] * len(batch),
            "parse_special_tokens": [parse_special_tokens] * len(batch),
        }
        each = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return _run(self._generate(batch, each, progress))

    async def _generate(
        self, batch: list[Prompt], each: Sequence[Mapping[str, Any]], progress: bool
    ) -> list[Completion]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("prompts", total=len(batch))

            async def one(prompt: Prompt, options: Mapping[str, Any]) -> Completion:
                async with slots:
                    completion = await collect(client, prompt, **options)
                bar.advance(task)
                return completion

            async with self._client() as client:
                return await asyncio.gather(*(one(p, options) for p, options in zip(batch, each, strict=True)))

    def _client(self) -> Client:
        # The LLM's own server is never restarted.
        return Client(self.target, retry_for=0 if self._server else RETRY_SECONDS, **self._access)

    def embed(self, texts: Sequence[Text], **options: Any) -> list[Embedding]:
        """See `Client.embed`."""
        return self._ask(lambda client: client.embed(texts, **options))

    def score(self, query: str, documents: Sequence[str], **options: Any) -> list[tuple[int, float]]:
        """See `Client.score`."""
        return self._ask(lambda client: client.score(query, documents, **options))

    def _ask(self, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        async def ask() -> T:
            async with self._client() as client:
                return await question(client)

        return _run(ask())

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


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop of another thread, because a notebook runs one in its own. Ctrl-C cancels it."""
    begun: Future[Callable[[], object]] = Future()

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        begun.set_result(lambda: loop.call_soon_threadsafe(cast("asyncio.Task[T]", task).cancel))
        return await work

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(asyncio.run, main())
        try:
            return answer.result()
        except KeyboardInterrupt:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                begun.result()()
            raise


def _refuse(arguments: Mapping[str, object], reason: str) -> None:
    for name, value in arguments.items():
        if value:
            raise ValueError(f"{name} {reason}")


def _for_each(batch: Sequence[Prompt], value: Any, kind: type, what: str) -> list[Any]:
    """One value for each prompt. Raises ValueError if `value` is a list of another length."""
    if value is None or isinstance(value, kind):
        return [value] * len(batch)
    each = list(value)
    if len(each) != len(batch):
        raise ValueError(f"there are {len(batch)} prompts and {len(each)} {what}")
    return each


async def collect(
    client: Client, prompt: Prompt, sampling: pb.SamplingParams | None = None, **options: Any
) -> Completion:
    """Read one stream to its end. `options` are the arguments of `Client.generate`."""
    completion = Completion(prompt, [Output() for _ in range(sampling.n or 1 if sampling else 1)])
    async for response in client.generate(prompt, sampling, **options):
        output = completion.outputs[response.index]
        output.text += response.text
        output.token_ids += response.token_ids
        output.logprobs += response.logprobs
        completion.prompt_logprobs += response.prompt_logprobs
        if response.finish_reason:
            output.finish_reason = response.finish_reason
            reason = response.WhichOneof("stop_reason")
            output.stop_reason = getattr(response, reason) if reason else None
            output.error = response.error.message
            completion.prompt_tokens = response.usage.prompt_tokens
            completion.cached_tokens = response.usage.cached_tokens
        if response.HasField("metrics"):
            completion.metrics = response.metrics
    return completion
