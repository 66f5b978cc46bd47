"""The asyncio client: the generated stub, with prompts as Python values."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.channel import CLIENTS_PORT, connect, direction, key_metadata, say_if_silent
from pagewire_client.embedding import Embedding
from pagewire_client.prompts import Messages, Prompt, Sound, Text, set_prompt, to_chat
from pagewire_client.resumable import ResumableStream
from pagewire_client.retry import Backoff

RETRY_SECONDS = 60.0

MAX_TEXTS = 2048
"""Texts of one call. Longer lists are split into several calls."""

T = TypeVar("T")


class Client:
    """A connection to a scheduler service. Create it inside the event loop that uses it.

    Every method raises grpc.aio.AioRpcError with the server's status and message. While the server cannot be reached or
    is shutting down, calls are retried for `retry_for` seconds, and logged as INFO by `pagewire_client`. A broken
    stream is resumed without losing or repeating a token. `tls` is a folder of certificates: see `channel.connect`.
    """

    def __init__(
        self, target: str, *, retry_for: float = RETRY_SECONDS, api_key: str = "", tls: Path | None = None
    ) -> None:
        self._retry_for = retry_for
        self._metadata = tuple(key_metadata(api_key) or ())
        self._target = target
        self._streams: dict[tuple[str, str], ResumableStream] = {}  # by tenant and request_id
        self._channel = connect(target, tls)
        self._explain = direction(target, tls, CLIENTS_PORT).explain
        self._stub = InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        self._connecting = asyncio.create_task(say_if_silent(self._channel, self._target, self._retry_for))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connecting.cancel()
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def wait_until_serving(self, timeout: float | None = None) -> None:
        """Wait until the server reports SERVING. Raises TimeoutError after `timeout` seconds, and AioRpcError if
        waiting is useless, for example for another service's port."""
        backoff = Backoff(math.inf, target=self._target)
        try:
            async with asyncio.timeout(timeout):
                while not await self._is_serving(backoff):
                    pass
        except TimeoutError:
            raise TimeoutError(f"the server was not ready within {timeout} s") from None

    async def _is_serving(self, backoff: Backoff) -> bool:
        """Watch the server's health. A load balancer without servers ends each watch at once, so a pause follows."""
        watch = self._health.Watch(health_pb2.HealthCheckRequest())
        try:
            async for response in watch:
                backoff.succeeded()
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
            pause = 0.0
        except grpc.aio.AioRpcError as error:
            pause = backoff.pause(await self._explain(error))
        finally:
            watch.cancel()
        await asyncio.sleep(pause)
        return False

    async def generate(
        self,
        prompt: Prompt,
        sampling: pb.SamplingParams | None = None,
        *,
        request_id: str = "",
        tenant: str = "",
        lora_name: str = "",
        priority: int = 0,
        cache_salt: str = "",
        parse_special_tokens: bool = False,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream a prompt's continuation. If the caller leaves the `async for` loop early, the server ends the request.

        `lora_name`: a low-rank adapter; empty for the base model. `priority`: with --scheduling-policy priority, lower
        numbers run first. `cache_salt`: cached prefixes are shared only with the same salt. `timeout`: seconds of the
        whole call. `retry_for`: seconds; the default is the client's.
        """
        request = pb.GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            tenant=tenant,
            sampling=sampling,
            lora_name=lora_name,
            priority=priority,
            cache_salt=cache_salt,
            parse_special_tokens=parse_special_tokens,
        )
        set_prompt(request, prompt)
        stream = ResumableStream(
            lambda request, timeout, more: self._stub.Generate(
                request, timeout=timeout, metadata=(*self._metadata, *more)
            ),
            request,
            timeout=timeout,
            backoff=Backoff(self._retry_for if retry_for is None else retry_for, target=self._target),
            explain=self._explain,
        )
        key = (tenant, request.request_id)
        self._streams.setdefault(key, stream)
        try:
            async with aclosing(stream.responses()) as responses:
                async for response in responses:
                    yield response
        finally:
            if self._streams.get(key) is stream:
                del self._streams[key]

    async def embed(
        self,
        texts: Sequence[Text],
        *,
        pooling: pb.Pooling = pb.POOLING_UNSPECIFIED,
        normalize: bool | None = None,
        dimensions: int = 0,
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        tenant: str = "",
        lora_name: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Embedding]:
        """The vectors of texts (strings or token ids), in order. `pooling` and `normalize` default to the model's
        training. `truncate_prompt_tokens`: the last tokens of each text to keep."""
        found: list[Embedding] = []
        for start in range(0, len(texts), MAX_TEXTS):
            request = pb.EmbedRequest(
                pooling=pooling,
                normalize=normalize,
                dimensions=dimensions,
                truncate=truncate,
                truncate_prompt_tokens=truncate_prompt_tokens,
                tenant=tenant,
                lora_name=lora_name,
                priority=priority,
                cache_salt=cache_salt,
            )
            for text in texts[start : start + MAX_TEXTS]:
                item = request.inputs.add()
                if isinstance(text, str):
                    item.text = text
                else:
                    item.token_ids.ids.extend(text)
                    item.token_ids.SetInParent()
            found += await self._retrying(self._embed, request)
        return found

    async def _embed(self, request: pb.EmbedRequest, metadata: Any) -> list[Embedding]:
        found = [Embedding() for _ in request.inputs]
        async for response in self._stub.Embed(request, metadata=metadata):
            found[response.index].add(response)
        return found

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        pair_format: str = "",
        truncate: bool = False,
        truncate_prompt_tokens: int | None = None,
        tenant: str = "",
        lora_name: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[tuple[int, float]]:
        """Returns (index, score) of each document, the highest score first.

        `pair_format` is for models that were trained on single texts, for example "Query: {query} Answer: {document}".
        """
        request = pb.ScoreRequest(
            query=query,
            documents=documents,
            top_n=top_n,
            pair_format=pair_format,
            truncate=truncate,
            truncate_prompt_tokens=truncate_prompt_tokens,
            tenant=tenant,
            lora_name=lora_name,
            priority=priority,
            cache_salt=cache_salt,
        )
        response = await self._retrying(self._stub.Score, request)
        return [(one.index, one.score) for one in response.scores]

    async def transcribe(
        self,
        sound: Sound,
        *,
        language: str = "",
        translate: bool = False,
        prompt: str = "",
        temperature: float = 0.0,
        seed: int | None = None,
        scores: bool = False,
        words: bool = False,
        tenant: str = "",
        lora_name: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[pb.TranscribeResponse]:
        """Yields the language, then segments of text with their times, then the end. Failed calls are not retried.

        `language`: an ISO 639 code or an English name; empty to detect it. `scores` adds confidence to segments, and
        `words` the time of each word. `prompt`: the text before the sound, or an example of names and style.
        """
        request = pb.TranscribeRequest(
            sound=pb.Sound(data=sound.data, content_type=sound.content_type),
            language=language,
            translate=translate,
            prompt=prompt,
            temperature=temperature,
            seed=seed,
            scores=scores,
            words=words,
            tenant=tenant,
            lora_name=lora_name,
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = self._stub.Transcribe(request, metadata=self._metadata)
        try:
            async for response in stream:
                yield response
        except grpc.aio.AioRpcError as error:
            raise await self._explain(error) from None
        finally:
            stream.cancel()

    async def abort(self, request_id: str, *, tenant: str = "") -> bool:
        """End a tenant's call in flight. Returns whether the call existed. A call of this client is not resumed, even
        if the server does not know it."""
        request = pb.AbortRequest(request_id=request_id, tenant=tenant)
        stream = self._streams.get((tenant, request_id))
        if stream is None:
            return (await self._retrying(self._stub.Abort, request)).aborted
        stream.abort()
        with suppress(grpc.aio.AioRpcError):
            if (await self._stub.Abort(request, metadata=self._metadata)).aborted:
                self._streams.pop((tenant, request_id), None)  # the server's remaining messages end the stream
                return True
        return stream.give_up()

    async def get_model(self) -> pb.GetModelResponse:
        return await self._retrying(self._stub.GetModel, pb.GetModelRequest())

    async def tokenize(self, text: str | Messages, *, parse_special_tokens: bool = False) -> list[int]:
        """Token ids of a text or of chat messages, as `generate` computes them."""
        request = pb.TokenizeRequest(parse_special_tokens=parse_special_tokens)
        if isinstance(text, str):
            request.text = text
        else:
            request.chat.CopyFrom(to_chat(text))
        return list((await self._retrying(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._retrying(self._stub.Detokenize, request)).text

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, as decoded within a longer text. At most 4,096 tokens."""
        request = pb.DetokenizeRequest(token_ids=token_ids, separately=True)
        return list((await self._retrying(self._stub.Detokenize, request)).texts)

    async def _retrying(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        """Call an idempotent method, with retries."""
        backoff = Backoff(self._retry_for, target=self._target)
        while True:
            try:
                return await method(request, metadata=(*self._metadata, *backoff.attempt()))
            except grpc.aio.AioRpcError as error:
                pause = backoff.pause(await self._explain(error))
            await asyncio.sleep(pause)
