"""A Generate call, in whatever protocol it came: a place, checks, the engine, and its outputs in that protocol."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc
import structlog

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_common import errors
from pagewire_common.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.frontend.engine_call import EngineCall
from scheduler_service.frontend.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.patient_writer import PatientWriter
from scheduler_service.frontend.request import RequestState, request_key
from scheduler_service.frontend.request_memory import prompt_logprob_bytes, request_bytes
from scheduler_service.frontend.resumption import check_resumption
from scheduler_service.frontend.streams import OutputDelta
from scheduler_service.frontend.validation import check_names, check_request, check_sizes

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
}

_CLIENTS_OWN = (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
"""Statuses of streams that the client left, or went on with in another call."""


class Answers(Protocol):
    """Makes a protocol's messages of what the outputs of one request gain."""

    def encode(self, delta: OutputDelta) -> Iterable[Any]:
        """The messages that this delta completes, in order; may raise RequestError."""


async def generate(
    link: EngineLink,
    request: pb.GenerateRequest,
    context: Context,
    make_answers: Callable[[RequestState, ServedModel], Answers],
    *,
    is_whole: bool = False,
    num_bytes: int = 0,
) -> None:
    """Serve a request to its end, or raise RequestError.

    With `is_whole` the client is sent each output once it has ended. `num_bytes`: memory of the call besides `request`.
    """
    check_names(request)
    check_sizes(request)
    request_id = request.request_id or uuid.uuid4().hex
    with EngineCall(link) as call:
        key = request_key(request.tenant, request_id)
        admitted_bytes = request_bytes(request, errors.request_size.get()) + num_bytes
        await call.admit(key, admitted_bytes, resumes=request.HasField("resume"))
        model = await link.model()
        checked = await check_resumption(request, await check_request(request, request_id, model), model)
        checked = replace(checked, is_whole=is_whole)
        more_bytes = prompt_logprob_bytes(checked.sampling.prompt_logprobs, len(checked.prompt_token_ids))
        state = await call.submit(checked, model, more_bytes)
        if checked.is_complete:
            return
        structlog.contextvars.bind_contextvars(request_id=request_id)
        ended: list[str] = []
        try:
            with _counting(link, state, ended):
                await _write(state, make_answers(state, model), ended, PatientWriter(context, link.stall_timeout))
        finally:
            call.finished = _report(state, ended)
        await call.close()


async def _write(state: RequestState, answers: Answers, ended: list[str], writer: PatientWriter) -> None:
    """Write the outputs to their ends, and why each ended into `ended`."""
    state.stream.when_cut = writer.give_up
    try:
        async for delta in state.stream:
            for message in answers.encode(delta):
                await writer.write(message)
            if delta.status is not None:
                ended.append(REASONS[delta.status])
    finally:
        writer.close()


@contextlib.contextmanager
def _counting(link: EngineLink, state: RequestState, ended: list[str]) -> Iterator[None]:
    """Counts the reasons why outputs ended; an output that its call cut off counts as an error or an abort."""
    counts, num_outputs = link.counts, state.stream.num_open
    try:
        yield
        counts.request_seconds.observe(time.monotonic() - state.arrived_at)
    except BaseException as error:
        failed = isinstance(error, RequestError) and error.code not in _CLIENTS_OWN
        ended += ["error" if failed else "abort"] * (num_outputs - len(ended))
        raise
    finally:
        counts.num_outputs.update(ended)


def _report(state: RequestState, ended: Sequence[str]) -> FinishedRequest:
    """Log how long the request waited; returns the same for operators."""
    metrics, num_prompt_tokens = state.metrics(time.monotonic()), len(state.request.prompt_token_ids)
    log.info(
        "request closed",
        prompt_tokens=num_prompt_tokens,
        output_tokens=state.num_output_tokens,
        finish_reasons=ended,
        **metrics.known(),
    )
    return FinishedRequest(
        request_id=state.request.request_id,
        tenant=state.request.tenant,
        finish_reasons=ended,
        prompt_tokens=num_prompt_tokens,
        output_tokens=sum(state.num_output_tokens),
        metrics=metrics.encode(),
    )
