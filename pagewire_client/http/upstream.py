"""The channel to the scheduler. The channel is replaced when the certificates change."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire_client.channel import OPTIONS
from pagewire_common.connection.tls import TlsFolder, secure_channel


@dataclass(slots=True)
class _Made:
    """A channel that uses one `generation` of the TLS files."""

    channel: grpc.aio.Channel
    generation: int
    num_users: int = 0


class Upstream:
    """The current channel. Create this object inside the event loop that uses it. Raises StartError for bad
    certificates.
    """

    def __init__(self, target: str, tls: Path | None = None) -> None:
        self._target = target
        self._tls = None if tls is None else TlsFolder(tls)
        self._made = self._make()

    def _make(self) -> _Made:
        generation = self._generation()
        return _Made(secure_channel(self._target, self._tls, OPTIONS, may_use_proxy=True), generation)

    def _generation(self) -> int:
        return 0 if self._tls is None else self._tls.refresh()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """The channel for the calls of one `with` block. The calls of the block continue on this channel even if a new
        channel replaces it meanwhile.
        """
        if self._generation() != self._made.generation:
            before, self._made = self._made, self._make()
            await self._close_unused(before)
        made = self._made
        made.num_users += 1
        try:
            yield made.channel
        finally:
            made.num_users -= 1
            await self._close_unused(made)

    async def _close_unused(self, made: _Made) -> None:
        if made is not self._made and not made.num_users:
            await made.channel.close()

    async def close(self) -> None:
        await self._made.channel.close()
