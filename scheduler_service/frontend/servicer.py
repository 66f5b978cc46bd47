"""InferenceService: from protobuf to a checked request, and from deltas to protobuf."""

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import structlog

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceServicer
from pagewire_common import errors
from pagewire_common.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.engine_call import EngineCall
from scheduler_service.frontend.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.patient_writer import PatientWriter
from scheduler_service.frontend.prompt import decode_tokens, encode_prompt
from scheduler_service.frontend.request import RequestState, request_key
from scheduler_service.frontend.request_memory import prompt_logprob_bytes, request_bytes
from scheduler_service.frontend.resumption import check_resumption
from scheduler_service.frontend.sampling_validation import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from scheduler_service.frontend.streams import OutputDelta
from scheduler_service.frontend.validation import check_names, check_request, check_sizes
from scheduler_service.wire.columns import fill_column

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: pb.FINISH_REASON_STOP,
    SequenceStatus.FINISHED_LENGTH_CAPPED: pb.FINISH_REASON_LENGTH,
    SequenceStatus.FINISHED_ABORTED: pb.FINISH_REASON_ABORT,
}
_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
}

_CLIENTS_OWN = (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
"""Statuses of streams that the client left, or went on with in another call."""


class InferenceServicer(InferenceServiceServicer):
    """The public service; see the .proto for its contract."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    async def Generate(  # type: ignore[override]  # it writes itself, to bound how long a write may take
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        check_names(request)
        check_sizes(request)
        request_id = request.request_id or uuid.uuid4().hex
        resumes = request.HasField("resume")
        with EngineCall(self._link) as call:
            key = request_key(request.tenant, request_id)
            await call.admit(key, request_bytes(request, errors.request_size.get()), resumes=resumes)
            model = await self._link.model()
            checked = await check_resumption(request, await check_request(request, request_id, model), model)
            more_bytes = prompt_logprob_bytes(checked.sampling.prompt_logprobs, len(checked.prompt_token_ids))
            state = await call.submit(checked, model, more_bytes)
            if checked.is_complete:
                return
            structlog.contextvars.bind_contextvars(request_id=request_id)
            ended: list[str] = []
            try:
                with self._counting(state, ended):
                    await self._write(state, model, ended, PatientWriter(context, self._link.stall_timeout))
            finally:
                call.finished = _report(state, ended)
            await call.close()

    async def _write(self, state: RequestState, model: ServedModel, ended: list[str], writer: PatientWriter) -> None:
        """Write the stream to its end, and why each output ended into `ended`."""
        state.stream.when_cut = writer.give_up
        seeded: set[int] = set()
        try:
            async for delta in state.stream:
                message = encode_delta(state, delta)
                if delta.index not in seeded:
                    seeded.add(delta.index)
                    message.seed = state.request.sampling.seed
                    message.model_fingerprint = model.fingerprint
                await writer.write(message)
                if delta.status is not None:
                    ended.append(_REASONS[delta.status])
        finally:
            writer.close()

    @contextlib.contextmanager
    def _counting(self, state: RequestState, ended: list[str]) -> Iterator[None]:
        """Counts the reasons why outputs ended; an output that its call cut off counts as an error or an abort."""
        counts, num_outputs = self._link.counts, state.stream.num_open
        try:
            yield
            counts.request_seconds.observe(time.monotonic() - state.arrived_at)
        except BaseException as error:
            failed = isinstance(error, RequestError) and error.code not in _CLIENTS_OWN
            ended += ["error" if failed else "abort"] * (num_outputs - len(ended))
            raise
        finally:
            counts.num_outputs.update(ended)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        check_names(request)
        return pb.AbortResponse(aborted=await self._link.abort(request_key(request.tenant, request.request_id)))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call()  # it may wait for the first worker
            model = await self._link.model()
        return pb.GetModelResponse(
            name=model.name,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            max_n=min(MAX_N, model.max_num_seqs),
            max_logprobs=MAX_LOGPROBS,
            max_stop_strings=MAX_STOP_STRINGS,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=model.tokenizer is not None and model.tokenizer.has_chat_template,
            fingerprint=model.fingerprint,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call(_num_bytes(request))
            response = pb.TokenizeResponse()
            fill_column(response, "token_ids", await encode_prompt(request, await self._link.model()))
            return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call(_num_bytes(request))
            return pb.DetokenizeResponse(text=await decode_tokens(request, await self._link.model()))


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


def _num_bytes(request: pb.TokenizeRequest | pb.DetokenizeRequest) -> int:
    return max(errors.request_size.get(), request.ByteSize())


def encode_delta(state: RequestState, delta: OutputDelta) -> pb.GenerateResponse:
    """One message of a stream; the last of an index carries why it ended and its usage."""
    message = pb.GenerateResponse(
        request_id=state.request.request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
    )
    if delta.logprobs or delta.prompt_logprobs:
        message.logprobs.extend(map(_encode_logprobs, delta.logprobs))
        message.prompt_logprobs.extend(map(_encode_logprobs, delta.prompt_logprobs))
    if delta.status is not None:
        message.finish_reason = _FINISH_REASONS[delta.status]
        if isinstance(delta.stop, str):
            message.stop_string = delta.stop
        elif delta.stop is not None:
            message.stop_token_id = delta.stop
        message.usage.prompt_tokens = len(state.request.prompt_token_ids)
        message.usage.cached_tokens = state.num_cached_tokens
        message.usage.output_tokens = delta.num_output_tokens
        if not state.stream.num_open:
            message.metrics.CopyFrom(state.metrics(time.monotonic()).encode())
    return message


def _encode_logprobs(position: TokenLogprobs) -> pb.TokenLogprobs:
    chosen, *top = (
        pb.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank)
        for rank, (token_id, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True))
    )
    chosen.rank = position.rank
    return pb.TokenLogprobs(chosen=chosen, top=top)
