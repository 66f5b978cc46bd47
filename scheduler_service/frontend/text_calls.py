"""Calls of many texts, each of which goes through the engine as a request of its own.

A call is admitted as one request, and then holds memory for some of its texts, as much as there is; so no text is
refused for others of its call. What comes of them is taken in their order: memory depends on what is in flight, and a
client that reads slowly slows its own call alone.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self

import structlog

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common import errors
from pagewire_common.errors import RequestError
from scheduler_service.access.caller import caller, tenant_of
from scheduler_service.core import PoolingParams, PoolingType, SamplingParams
from scheduler_service.frontend.checks import check_length, invalid
from scheduler_service.frontend.engine_call import EngineCall
from scheduler_service.frontend.engine_link import EngineLink
from scheduler_service.frontend.generation import allowed_model
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.request import GenerationRequest, RequestState, request_key
from scheduler_service.frontend.request_memory import text_bytes, texts_bytes
from scheduler_service.frontend.sampling_validation import MAX_STRING
from scheduler_service.frontend.tokenization import TextItem
from scheduler_service.frontend.validation import check_characters, check_place

log = structlog.get_logger()

MAX_TEXTS = 2048
IN_FLIGHT = 256
"""Texts of one call that are with the engine at a time: two steps of 2,048 tokens with texts of 16, so that those of
the next step are there while one is computed. With 128 MiniLM gave 176 of them a second on two cores, with 256 225.
"""
IN_FLIGHT_BYTES = 32 << 20
"""Of memory that a call holds for these, if there are several: with a vector for each token one may take more."""

Take = Callable[[int, RequestState], Awaitable[None]]
"""Takes what comes of the text of this number."""


class TextCall:
    """One call, from its admission to its end, as an `async with` block, which raises RequestError where it is refused.

    `model` is the one that is served; `num_tokens` and `num_cached_tokens` are of the texts that are done.
    """

    model: ServedModel

    def __init__(self, link: EngineLink, request: pb.EmbedRequest | pb.ScoreRequest) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._num_texts = 0
        self._link = link
        self._request = request
        self._id = uuid.uuid4().hex
        self._open = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        request = self._request
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._logged())
            check_characters("tenant", request.tenant)
            check_characters("lora_name", request.lora_name)
            if isinstance(request, pb.EmbedRequest):
                name, num_texts = "inputs", len(request.inputs)
            else:
                name, num_texts = "documents", len(request.documents)
            check_length(name, num_texts, MAX_TEXTS)
            if not num_texts:
                invalid(f"{name} is empty; at least one text is needed")
            request.tenant = tenant_of(request.tenant)
            if (api_key := caller.get()) is not None:
                api_key.check_adapter(request.lora_name)
            self._call = stack.enter_context(EngineCall(self._link))
            num_bytes = texts_bytes(request, errors.request_size.get())
            key = request_key(request.tenant, self._id)
            self._adapter = await self._call.admit(key, num_bytes, lora_name=request.lora_name)
            self.model = await allowed_model(self._link)
            check_place(request, self.model)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    async def run(self, items: AsyncIterator[TextItem], pooling: PoolingParams, take: Take, longest: int) -> None:
        """Have every text computed, and what came of each taken, in their order. Raises RequestError.

        longest: the tokens of the longest one at most.
        """
        room = _Room(self._call, _bytes_of(min(longest, self.model.context_length), pooling))
        number, before = 0, asyncio.Event()
        before.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                async for item in items:
                    num_bytes, after = _bytes_of(len(item.token_ids), pooling), asyncio.Event()
                    await room.enter(num_bytes)
                    task = tasks.create_task(self._one(number, item, pooling, take, before, after))
                    task.add_done_callback(partial(room.leave, num_bytes))
                    number, before = number + 1, after
        except BaseExceptionGroup as group:
            refusals = (error for error in group.exceptions if isinstance(error, RequestError))
            raise next(refusals, group.exceptions[0]) from None

    async def _one(
        self,
        number: int,
        item: TextItem,
        pooling: PoolingParams,
        take: Take,
        before: asyncio.Event,
        after: asyncio.Event,
    ) -> None:
        """before: set when the texts before this one were taken; after: to be set when this one was."""
        request, num_tokens = self._request, len(item.token_ids)
        pooled = replace(pooling, num_first_tokens=item.num_first_tokens)
        checked = GenerationRequest(
            request_id=f"{self._id}-{number}",
            prompt_token_ids=item.token_ids,
            sampling=SamplingParams(max_tokens=1, pooling=pooled),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            priority=request.priority,
            adapter=self._adapter,
        )
        with EngineCall(self._link) as call:
            state = await call.submit(checked, self.model, part_of=self._call)
            await before.wait()
            await take(number, state)
            after.set()
        self._num_texts += 1
        self.num_tokens += num_tokens
        self.num_cached_tokens += state.num_cached_tokens
        state.counts.finished(num_tokens, 0)

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """Log one line of the call, however it ends."""
        request, began, status = self._request, time.monotonic(), "OK"
        try:
            yield
        except RequestError as error:
            status = error.code.name
            raise
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except BaseException:
            status = "INTERNAL"
            raise
        finally:
            key = caller.get()
            names = {"api_key": key.id} if key is not None else {}
            if request.lora_name:
                names["lora_name"] = request.lora_name[:MAX_STRING]
            log.info(
                "texts closed",
                status=status,
                request_id=self._id,
                tenant=(request.tenant if key is None else key.tenant)[:MAX_STRING],
                num_texts=self._num_texts,
                prompt_tokens=self.num_tokens,
                total_seconds=time.monotonic() - began,
                **names,
            )


def _bytes_of(num_tokens: int, pooling: PoolingParams) -> int:
    """Of a text's memory, with its vectors."""
    num_vectors = num_tokens if pooling.type is PoolingType.ALL else 1
    return text_bytes(num_tokens, num_vectors * pooling.vector_bytes)


class _Room:
    """For texts that are with the engine: by number, and by the memory that their call holds.

    That is `least` or more from the beginning, so that the longest text needs no more when its turn comes.
    """

    def __init__(self, call: EngineCall, least: int) -> None:
        self._call = call
        self._least = least
        self._held = 0
        self._num_texts = 0
        self._num_bytes = 0
        self._left = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Wait for room. Raises RequestError where there is no memory even for a single text."""
        while self._num_texts >= IN_FLIGHT or self._num_bytes + num_bytes > self._held:
            if self._num_texts >= IN_FLIGHT or not await self._grow(self._num_bytes + num_bytes - self._held):
                self._left.clear()
                await self._left.wait()
        self._num_texts += 1
        self._num_bytes += num_bytes

    async def _grow(self, missing: int) -> bool:
        """Hold more memory, to twice as much if there are texts to wait for otherwise; returns whether there is any."""
        more, allowed = max(missing, self._least - self._held), IN_FLIGHT_BYTES - self._held
        if self._num_texts:
            if missing > allowed:
                return False
            more = max(missing, min(self._held, allowed))
        try:
            await self._call.hold(more)
        except RequestError:
            if not self._num_texts:
                raise
            return False
        self._held += more
        return True

    def leave(self, num_bytes: int, _: object) -> None:
        self._num_texts -= 1
        self._num_bytes -= num_bytes
        self._left.set()
