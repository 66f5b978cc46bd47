"""A stream of server-sent events, with the ids that resume the stream, and without the events that a client has."""

import asyncio
from array import array
from collections.abc import Iterable
from zlib import crc32

import grpc
from aiohttp import web

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.http.errors import RETRY_SECONDS, HttpError, invalid, refused_by
from scheduler_service.frontend.http.resuming.event_ids import HEADER, EventIds, Origin, Position
from scheduler_service.frontend.http.resuming.replay import not_the_same
from scheduler_service.frontend.http.writing import begin_events, end, write

_HOW_TO_RESUME = f"; to resume the stream, send the request again, with the last event's id in the header {HEADER}"


class EventStream:
    """The events of one response. `ids`: None if events have no ids.

    `position`: the last event that the client has received of a broken stream. Events up to there are not sent.
    """

    def __init__(
        self,
        request: web.Request,
        num_outputs: int,
        ids: EventIds | None = None,
        origin: Origin | None = None,
        position: Position | None = None,
    ) -> None:
        self._request, self._ids, self.origin, self.position = request, ids, origin or Origin(), position
        self.number = 0
        """The number of events so far, including events that are not sent because the client has them."""
        self._num_tokens = [0] * num_outputs  # before the current delta
        self._output = self._num_new = 0  # of the current delta
        self._num_events = 0  # before the current delta
        self._has_place = True  # whether an id can say where the current delta is
        self._checksums = [0] * num_outputs
        self._replayed = position  # None if the stream is past the delta of the client's last event
        self._num_to_skip = 0
        self._retry = ""
        self._response: web.StreamResponse | None = None
        if position is not None and not position.num_new and not any(position.num_tokens):
            self._reach(position)

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    @property
    def has_ids(self) -> bool:
        return self._ids is not None

    def prepare(self, asked: pb.GenerateRequest) -> None:
        """Give the request the seed that its repetition will have. Mark a repeated request as a resumption. Raises
        HttpError for a request that cannot be repeated.
        """
        sampling = asked.sampling
        if self._ids is None:
            return
        if sampling.beam_width or sampling.best_of > max(1, sampling.n):
            raise invalid(f"{HEADER} is not for best_of and beam search, whose outputs come whole", HEADER)
        if not sampling.HasField("seed"):
            sampling.seed = self.origin.seed
        if self.position is not None:
            asked.resume.SetInParent()  # ends the broken call if it still runs

    async def begin(self) -> None:
        """Send the head of the answer, if it is not sent yet."""
        if self._response is None:
            self._response = await begin_events(self._request)

    def advance(self, output: int, token_ids: Iterable[int]) -> None:
        """Note that the next events belong to a new delta of an output. Raises RequestError if the tokens so far differ
        from the tokens of the broken stream.
        """
        if self._ids is None:
            return
        self._num_tokens[self._output] += self._num_new
        ids = array("I", token_ids)
        self._output, self._num_new = output, len(ids)
        self._checksums[output] = crc32(ids.tobytes(), self._checksums[output])
        self._num_events = self.number
        self._has_place = bool(ids)  # the end of an aborted output comes without a token, and not again
        if (sought := self._replayed) is None:
            return
        if (*self._num_tokens, output, len(ids)) == (*sought.num_tokens, sought.output, sought.num_new):
            if self._checksum() != sought.checksum:
                raise not_the_same()
            self._reach(sought)

    def _reach(self, position: Position) -> None:
        self.number = self._num_events = position.num_events
        self._num_to_skip = position.num_sent
        self._replayed = None

    async def send(self, *events: str) -> None:
        """Send the events that the client does not have yet. `events`: the lines of each, without the last line end.

        If the client has all of them, a comment is sent, which keeps the connection busy.
        """
        written = [f"{event}\n{self._last_lines()}" for event in events if self._is_new()]
        if events:
            await self._write("".join(written) or ":\n")

    async def send_in_parts(self, parts: Iterable[str]) -> None:
        """Send one event, whose parts are made immediately before they are sent."""
        if self._is_new():
            for part in parts:
                await self._write(part)
                await asyncio.sleep(0)  # lets other tasks run
            await self._write(f"\n{self._last_lines()}")

    def _is_new(self) -> bool:
        """Count an event. Returns whether the client does not have it."""
        self.number += 1
        if self._replayed is None and self._num_to_skip:
            self._num_to_skip -= 1
            return False
        return self._replayed is None

    async def _write(self, text: str) -> None:
        assert self._response is not None
        await write(self._response, text.encode())

    def _last_lines(self) -> str:
        """The end of an event. The id comes last: a client that has read an id has read the event."""
        if self._ids is None or not self._has_place:
            retry, self._retry = self._retry, ""
            return f"{retry}\n"
        num_sent = self.number - self._num_events
        place = (tuple(self._num_tokens), self._output, self._num_new, self._num_events, num_sent)
        return f"id: {self._ids.write(self.origin, Position(*place, self._checksum()))}\n\n"

    def _checksum(self) -> int:
        return crc32(array("I", self._checksums).tobytes())

    def is_resumable_after(self, error: RequestError | HttpError) -> bool:
        """Whether the server, not the request, is the reason of an error."""
        return self.has_ids and isinstance(error, RequestError) and error.code is grpc.StatusCode.UNAVAILABLE

    def failure(self, error: RequestError | HttpError) -> HttpError:
        """The error that ends the stream. It has no id, and nor have the events after it: a resumed stream has none of
        them.
        """
        found = error if isinstance(error, HttpError) else refused_by(error)
        is_resumable = self.is_resumable_after(error)
        if self._replayed is not None:
            self.number = self._replayed.num_events + self._replayed.num_sent
        self._ids, self._replayed, self._num_to_skip = None, None, 0
        if not is_resumable:
            return found
        self._retry = f"retry: {1000 * RETRY_SECONDS}\n"
        said = found.body["error"]
        return HttpError(found.status, said["code"], said["message"] + _HOW_TO_RESUME, said["param"])

    async def end(self, last: str = "") -> web.StreamResponse:
        """Send the last event, if there is any, and end the answer."""
        await self.begin()
        if last:
            await self.send(last)
        assert self._response is not None
        await end(self._response)
        return self._response
