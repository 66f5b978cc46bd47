"""The front end's side of a client call in the engine: admission, submission and close, and both again in the next
engine.
"""

import asyncio
import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Self

import grpc

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire.v1.sequence_group_pb2 import TokenSequence
from pagewire_common.calls.errors import RequestError
from scheduler_service.access.caller import caller
from scheduler_service.core import EncoderInput
from scheduler_service.core.blocks.keys import block_keys, key_of_adapter, root_behind, root_key
from scheduler_service.core.groups.prompt_item import Items
from scheduler_service.frontend.link.engine_connection import CODES, accepted
from scheduler_service.frontend.link.engine_link import EngineLink, patience
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.request_trace import RequestTrace
from scheduler_service.wire.messages import encode_fields, encode_sampling, fill_items, pack

KEYS_AT_ONCE = 1024
"""Keys computed in one turn of the event loop, at 1 µs each: a prompt of 131,000 tokens would block it for 24 ms."""
MAX_ENGINES = 8
"""Engines that may end during one request: a request that ends each of its engines would end all others."""


class _Submission(NamedTuple):
    request: GenerationRequest
    state: RequestState
    model: ServedModel
    num_bytes: int
    trace: RequestTrace | None
    part_of: "EngineCall | None"
    supersedes: bool
    patience: float


class EngineCall:
    """One client call, open during a `with` block: the engine admits the call, then queues its request."""

    def __init__(self, link: EngineLink) -> None:
        self.finished: FinishedRequest | None = None
        self._is_known = False  # to the engine, which must then learn of the end
        self._state: RequestState | None = None
        self._admit: pb.Admit | None = None
        self._admission: asyncio.Future[pb.Answer] | None = None
        self._submission: _Submission | None = None
        self._queued: asyncio.Future[pb.Answer] | None = None
        self._num_engines = 1
        self._link = link
        self.number = link.connection.new_number()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.open_calls.pop(self.number, None)
        self._link.requests.forget(self.number)
        if self._state is not None:
            self._state.stream.leave()
        self._link.connection.leave(self.number)
        if self._is_known:
            self._link.connection.say(self.number, close=pb.CloseCall(finished=self.finished))

    async def close(self) -> None:
        """Close the call, and wait until the engine has freed its place, so that the client may reuse the request id at
        once.
        """
        self._is_known = False
        self._link.open_calls.pop(self.number, None)
        with contextlib.suppress(RequestError):  # the engine is gone, and the place with it
            await self._link.connection.ask(self.number, close=pb.CloseCall(finished=self.finished, is_answered=True))

    async def admit(
        self, key: str, num_bytes: int, *, later_bytes: int = 0, resumes: bool = False, adapter_name: str = ""
    ) -> str:
        """Wait until the engine admits the call, so that a flood of calls is refused before any work. Raises
        RequestError.

        `later_bytes`: memory that the call takes after the answer. Returns the adapter's fingerprint; "" without an
        adapter.
        """
        self._ask_admission(key, num_bytes, later_bytes, resumes=resumes, adapter_name=adapter_name)
        return await self.admitted()

    async def admit_early(
        self, key: str, num_bytes: int, *, later_bytes: int = 0, resumes: bool = False, adapter_name: str = ""
    ) -> str:
        """As `admit`, but without waiting if possible; `submit` then raises the refusal.

        The call waits if it names an adapter, after a recent refusal of the API key, and while the model is unknown.
        """
        link = self._link
        self._ask_admission(key, num_bytes, later_bytes, resumes=resumes, adapter_name=adapter_name)
        if adapter_name or link.admissions.must_wait(_api_key_id()) or link.loading.model is None:
            return await self.admitted()
        return ""

    async def admitted(self) -> str:
        """Wait for the engine's answer. Returns and raises the same as `admit`."""
        assert self._admission is not None
        return (await accepted(self._admission)).adapter_id

    def _ask_admission(self, key: str, num_bytes: int, later_bytes: int, *, resumes: bool, adapter_name: str) -> None:
        self._admit = admit = pb.Admit(
            key=key,
            num_bytes=num_bytes + later_bytes,
            resumes=resumes,
            api_key_id=_api_key_id(),
            adapter_name=adapter_name,
        )
        self._admission = self._link.admit(self.number, admit, num_bytes)
        self._know()

    def _know(self) -> None:
        self._is_known = True
        self._link.open_calls[self.number] = self

    async def hold(self, num_bytes: int) -> None:
        """Reserve more memory for this call. Raises RequestError if memory is lacking."""
        await self._link.connection.ask(self.number, hold=pb.Hold(num_bytes=num_bytes))
        assert self._admit is not None
        self._admit.num_bytes += num_bytes

    async def admit_side_call(self, num_bytes: int = 0) -> None:
        await self.admit("", num_bytes)

    async def submit(
        self,
        request: GenerationRequest,
        model: ServedModel,
        num_bytes: int = 0,
        trace: RequestTrace | None = None,
        part_of: "EngineCall | None" = None,
    ) -> RequestState:
        """Queue the request in the engine. A resuming request replaces the request in flight. Raises RequestError.

        `num_bytes`: memory of the request in addition to its admission. `part_of`: the admitted call to which this part
        belongs.
        """
        if self._admission is not None and self._admission.done():
            await self.admitted()
        link = self._link
        requests = link.requests
        counts = requests.counts.of(request.tenant)
        state = RequestState(request, model.tokenizer, counts, requests.turns, requests.unread)
        state.trace = trace
        requests.register(self.number, state)
        self._state = state
        self._submission = _Submission(
            request, state, model, num_bytes, trace, part_of, request.resumes, patience.get()
        )
        message = await _encode(self._submission, link)
        self._queued = queued = link.connection.question(self.number, submit=message)
        self._know()
        if part_of is None:
            await self.admitted()
        try:
            await accepted(queued)
        except RequestError:
            await (part_of or self).admitted()  # raises the reason of a call that the next engine has refused
            raise
        return state

    async def restore(self) -> None:
        """Tell the engine what a lost engine knew of this call. A refusal ends the request."""
        connection = self._link.connection
        if self._submission is not None and self._submission.state.is_over:
            return  # a resuming call may use the request id
        if self._admit is not None:
            assert self._admission is not None
            if not self._admission.done() or self._admission.result().code:
                return  # all of its questions are held, or the call is about to end
            admit = pb.Admit()
            admit.CopyFrom(self._admit)
            admit.restores, admit.adapter_id = True, self._admission.result().adapter_id
            connection.question(self.number, restores=True, admit=admit).add_done_callback(self._readmitted)
        if self._submission is None or self._queued is None or not self._queued.done():
            return
        self._num_engines += 1
        if self._num_engines > MAX_ENGINES:
            reason = f"{MAX_ENGINES} engines have ended while this request was in flight"
            self._submission.state.stream.fail(RequestError(grpc.StatusCode.INTERNAL, reason))
            return
        model = self._link.loading.model or self._submission.model
        message = await _encode(self._submission._replace(supersedes=False, model=model), self._link)
        if self.number in self._link.open_calls:  # not closed meanwhile
            queued = connection.question(self.number, restores=True, submit=message)
            queued.add_done_callback(self._restored)

    def _readmitted(self, answer: asyncio.Future[pb.Answer]) -> None:
        if answer.result().code:
            self._admission = answer
            if self._state is not None:
                self._state.stream.fail(_error(answer))

    def _restored(self, answer: asyncio.Future[pb.Answer]) -> None:
        assert self._submission is not None
        admission = (self._submission.part_of or self)._admission
        if answer.result().code:
            assert admission is not None
            self._submission.state.stream.fail(_error(admission if admission.result().code else answer))


def _error(refusal: asyncio.Future[pb.Answer]) -> RequestError:
    return RequestError(CODES[refusal.result().code], refusal.result().message)


async def _encode(submission: _Submission, link: EngineLink) -> pb.Submit:
    """The request, with the tokens that its outputs have by now."""
    request, state, model, num_bytes, trace, part_of, supersedes, seconds = submission
    welcome = link.welcome.result()
    root = root_key(welcome.cache_secret, request.tenant.encode(), request.cache_salt.encode())
    begun = state.begun
    message = pb.Submit(
        prompt_token_ids=pack(request.prompt_token_ids),
        cache_root=root,
        tenant=request.tenant,
        priority=request.priority,
        output_token_ids=[TokenSequence(token_ids=tokens) for tokens in begun],
        ended=state.ended,
        first_output=state.first_output,
        num_bytes=num_bytes,
        supersedes=supersedes,
        is_complete=request.is_complete,
        trace_parent=trace.submitted(request, state.times.arrived_at) if trace is not None else "",
    )
    if request.encoder_input is not None:
        encode_fields(EncoderInput, request.encoder_input, message.encoder_input)
    fill_items(message.items, request.items)
    if part_of is not None:
        message.part_of, message.key = part_of.number, request.key
    if seconds < welcome.no_worker_timeout:
        message.no_worker_timeout = seconds
    sampling = replace(request.sampling, prompt_logprobs=None) if state.has_prompt_logprobs else request.sampling
    encode_sampling(sampling, message)
    if welcome.prefix_caching and model.generates:
        first = key_of_adapter(root_behind(root, request.encoder_input), request.adapter_id)
        message.block_keys = await _block_keys(
            first, [*request.prompt_token_ids, *next(iter(begun), ())], model.block_size, request.items
        )
    return message


def _api_key_id() -> str:
    api_key = caller.get()
    return api_key.id if api_key else ""


async def _block_keys(first: bytes, token_ids: Sequence[int], block_size: int, items: Items = ()) -> bytes:
    """The prefix-cache keys of a request's full blocks, computed here to relieve the only engine."""
    keys, remaining = bytearray(), block_keys(first, array("I", token_ids), block_size, items)
    while some := list(islice(remaining, KEYS_AT_ONCE)):
        keys += b"".join(some)
        if len(some) == KEYS_AT_ONCE:
            await asyncio.sleep(0)
    return bytes(keys)
