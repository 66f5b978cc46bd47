"""Calls with many texts (Embed, Score), each a separate request in the engine.

A call reserves memory for some of its texts while the others wait, so that they never cause a refusal.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.calls.request_limits import request_size
from scheduler_service.core import PoolingParams, PoolingType
from scheduler_service.frontend.calls.generation import Context
from scheduler_service.frontend.calls.parted_call import PartedCall
from scheduler_service.frontend.checking.checks import check_length, invalid
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.output.request_memory import text_bytes, texts_bytes
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.request_trace import EMBEDDINGS, SCORE
from scheduler_service.frontend.text.tokenization import TextItem
from scheduler_service.wire.sampling import RequestSampling

MAX_TEXTS = 2048
IN_FLIGHT = 256
"""Largest number of one call's texts in the engine. At 16 tokens a text, 256 texts fill two steps of 2,048 tokens.
MiniLM on two cores embeds 225 texts a second; with a limit of 128, it embeds 176.
"""
IN_FLIGHT_BYTES = 32 << 20
"""Bytes of one call's texts in flight. A single text with a vector for each token may take more."""

Take = Callable[[int, RequestState], Awaitable[None]]


class TextCall(PartedCall):
    event = "texts closed"

    def __init__(self, link: EngineLink, request: pb.EmbedRequest | pb.ScoreRequest, context: Context) -> None:
        super().__init__(link, request, context, texts_bytes(request, request_size.get()))
        self.operation = EMBEDDINGS if isinstance(request, pb.EmbedRequest) else SCORE
        self._named = (
            ("inputs", request.inputs) if isinstance(request, pb.EmbedRequest) else ("documents", request.documents)
        )

    def _check(self) -> None:
        name, texts = self._named
        check_length(name, len(texts), MAX_TEXTS)
        if not texts:
            invalid(f"{name} is empty; at least one text is needed")

    def _figures(self) -> dict[str, Any]:
        return {"num_texts": self._num_parts}

    async def run(self, items: AsyncIterator[TextItem], pooling: PoolingParams, take: Take, longest: int) -> None:
        """Compute the vectors of every text, and pass them to `take` in the order of the texts. Raises RequestError."""
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
        """Compute one text, between the events of the previous text's result (`before`) and its own (`after`)."""
        pooled = replace(pooling, num_first_tokens=item.num_first_tokens)
        async with self.part(number, item.token_ids, RequestSampling(max_tokens=1, pooling=pooled)) as state:
            await before.wait()
            await take(number, state)
            after.set()


def _bytes_of(num_tokens: int, pooling: PoolingParams) -> int:
    num_vectors = num_tokens if pooling.type is PoolingType.ALL else 1
    return text_bytes(num_tokens, num_vectors * pooling.vector_bytes)


class _Room:
    """Limits the texts of a call in the engine. `least`: the smallest reservation in bytes, for the longest text."""

    def __init__(self, call: EngineCall, least: int) -> None:
        self._call = call
        self._least = least
        self._held = 0
        self._num_texts = 0
        self._num_bytes = 0
        self._left = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Wait until the limits allow another text. Raises RequestError if a single text does not fit into memory."""
        while self._num_texts >= IN_FLIGHT or self._num_bytes + num_bytes > self._held:
            if self._num_texts >= IN_FLIGHT or not await self._grow(self._num_bytes + num_bytes - self._held):
                self._left.clear()
                await self._left.wait()
        self._num_texts += 1
        self._num_bytes += num_bytes

    async def _grow(self, missing: int) -> bool:
        """Reserve at least `missing` more bytes, or more for later. Returns whether enough memory was free."""
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
