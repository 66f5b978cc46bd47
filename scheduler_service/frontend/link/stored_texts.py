"""Texts that the engine stores for all front ends, by the caller's tenant."""

import asyncio

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.access.caller import tenant_of
from scheduler_service.frontend.link.engine_connection import EngineConnection

MAX_STORED_BYTES = 1 << 20
"""Largest number of bytes of a stored text. The engine parses a message of a mebibyte in 1 ms."""


class StoredTexts:
    """A front end reads or stores one text at a time, so that few large messages wait in the engine."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self._asking: set[asyncio.Task[pb.Answer]] = set()

    async def store(self, text_id: str, data: bytes) -> None:
        """Raises RequestError if the engine is gone."""
        assert len(data) <= MAX_STORED_BYTES
        await self._ask(store_entry=pb.StoreEntry(tenant=tenant_of(""), id=text_id, data=data))

    async def read(self, text_id: str) -> bytes | None:
        """A text of the caller's tenant; None if there is none. Raises RequestError if the engine is gone."""
        answer = await self._ask(read_entry=pb.ReadEntry(tenant=tenant_of(""), id=text_id))
        return answer.data if answer.found else None

    async def delete(self, text_id: str) -> bool:
        """Forget a text of the caller's tenant. Returns whether it was there. Raises RequestError."""
        return (await self._ask(delete_entry=pb.DeleteEntry(tenant=tenant_of(""), id=text_id))).found

    async def _ask(self, **event: pb.StoreEntry | pb.ReadEntry | pb.DeleteEntry) -> pb.Answer:
        """Ask the engine. If the client leaves, the turn ends with the answer nevertheless."""
        asking = asyncio.create_task(self._ask_in_turn(**event))
        self._asking.add(asking)
        asking.add_done_callback(self._forget)
        return await asyncio.shield(asking)

    async def _ask_in_turn(self, **event: pb.StoreEntry | pb.ReadEntry | pb.DeleteEntry) -> pb.Answer:
        async with self._turn:
            return await self._connection.ask(self._connection.new_number(), **event)

    def _forget(self, asking: asyncio.Task[pb.Answer]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # counts as seen, although the client may be gone
