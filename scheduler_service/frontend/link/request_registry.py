"""The requests in flight of a front end, which receive the engine's messages."""

from collections.abc import Sequence

import grpc
import structlog

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.link.engine_connection import CODES, EngineConnection
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.request_state import RequestState, decode_gained
from scheduler_service.frontend.output.streams import Turns
from scheduler_service.statistics.counts import CountsByTenant

log = structlog.get_logger()


class RequestRegistry:
    """The requests of open calls. Create the registry inside the event loop."""

    def __init__(self, connection: EngineConnection) -> None:
        self.by_call: dict[int, RequestState] = {}
        self.counts = CountsByTenant()
        self.turns = Turns()
        self.unread = UnreadOutput(0)
        self._connection = connection
        self._by_output: dict[int, RequestState] = {}  # by output number
        self._output_numbers = 1

    def register(self, call: int, state: RequestState) -> None:
        state.call, state.first_output = call, self._output_numbers
        self._output_numbers += state.request.sampling.n
        self.by_call[call] = state
        for index in range(state.request.sampling.n):
            self._by_output[state.first_output + index] = state

    def forget(self, call: int) -> None:
        if (state := self.by_call.pop(call, None)) is not None:
            for index in range(state.request.sampling.n):
                del self._by_output[state.first_output + index]

    def gain_tokens(self, outputs: Sequence[int], token_ids: Sequence[int], now: float) -> None:
        """Append one token to each of the `outputs`, which have not ended in the engine."""
        by_output = self._by_output
        for output, token_id in zip(outputs, token_ids, strict=True):
            state = by_output.get(output)
            if state is None:  # the call is closed, but the engine has not processed the close yet
                continue
            index = output - state.first_output
            try:
                if state.gain_token(index, token_id, now):
                    self._stop_output(state, index)
            except Exception as error:
                self._fail(state, error)

    def take(self, event: pb.EngineEvent, now: float) -> None:
        """Process an event of one request. An error ends only this request's stream."""
        if (state := self.by_call.get(event.call)) is None:
            return
        try:
            self._take(event, state, now)
        except Exception as error:
            self._fail(state, error)

    def _take(self, event: pb.EngineEvent, state: RequestState, now: float) -> None:
        match event.WhichOneof("event"):
            case "standing":
                state.stands(event.standing)
            case "gained":
                if state.gain(decode_gained(event.gained), now):
                    self._stop_output(state, event.gained.index)
            case "hypotheses":
                state.gain_hypotheses(event.hypotheses.hypotheses, now)
            case "aborted":
                state.abort()
            case "failed":
                error = RequestError(CODES[event.failed.code], event.failed.message)
                if event.failed.at_once:
                    state.stream.cut(error)
                else:
                    state.stream.fail(error)

    def _stop_output(self, state: RequestState, index: int) -> None:
        """Tell the engine, which sees no text, that a stop string ended an output."""
        self._connection.say(state.call, stop_output=pb.StopOutput(index=index))

    def _fail(self, state: RequestState, error: Exception) -> None:
        log.error("request failed", request_id=state.request.request_id, exc_info=error)
        state.stream.fail(RequestError(grpc.StatusCode.INTERNAL, "the request could not be served"))
        self.forget(state.call)

    def fail_all(self, error: RequestError) -> None:
        for state in self.by_call.values():
            state.stream.fail(error)

    def cut_largest(self) -> None:
        """End the requests with the most unread output, until all unread output is within its limit."""
        if not self.unread.is_too_much:
            return
        for state in sorted(self.by_call.values(), key=lambda state: -state.stream.num_unread):
            if not self.unread.is_too_much:
                return
            reason = (
                f"this request has {state.stream.num_unread / 2**20:.1f} MiB of output that its client has not read, "
                "or that waits until the best outputs are known: the most of all requests, which together may have "
                f"{self.unread.most / 2**20:.1f} MiB (a part of --request-memory); read faster, or ask for fewer "
                "log-probabilities or outputs"
            )
            self.forget(state.call)
            state.stream.cut(RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))
