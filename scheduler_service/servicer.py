"""InferenceService: from protobuf to a checked request, and from deltas to protobuf."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import structlog

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceServicer
from pagewire_common import errors
from pagewire_common.errors import RequestError
from scheduler_service.columns import fill_column
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.engine import Engine
from scheduler_service.patient_writer import PatientWriter
from scheduler_service.request import RequestState, request_key
from scheduler_service.request_memory import prompt_logprob_bytes, request_bytes
from scheduler_service.resumption import check_resumption
from scheduler_service.side_calls import SideCalls
from scheduler_service.streams import OutputDelta
from scheduler_service.validation import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    check_names,
    check_request,
    check_sizes,
    decode_tokens,
    encode_prompt,
)

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

MAX_SIDE_CALLS = 256
MAX_SIDE_BYTES = 16 << 20
"""Bytes of calls other than Generate: some seconds of tokenizing, on a thread of their own."""

_CLIENTS_OWN = (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
"""Statuses of streams that the client left, or went on with in another call."""


class InferenceServicer(InferenceServiceServicer):
    """The public service; see the .proto for its contract."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._side_calls = SideCalls(
            "Tokenize, Detokenize and GetModel", max_calls=MAX_SIDE_CALLS, max_bytes=MAX_SIDE_BYTES
        )

    async def Generate(  # type: ignore[override]  # it writes itself, to bound how long a write may take
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        check_names(request)
        check_sizes(request)
        request_id = request.request_id or uuid.uuid4().hex
        resumes = request.HasField("resume")
        key = request_key(request.tenant, request_id)
        with self._engine.admission(key, request_bytes(request, errors.request_size.get()), resumes=resumes):
            model = await self._engine.model()
            checked = await check_resumption(request, await check_request(request, request_id, model), model)
            self._engine.hold(
                key, prompt_logprob_bytes(checked.sampling.prompt_logprobs, len(checked.prompt_token_ids))
            )
            keys = await self._engine.block_keys(checked, model)
            if resumes:
                self._engine.supersede(checked)
            if checked.is_complete:
                return
            state = self._engine.submit(checked, model, keys)
        structlog.contextvars.bind_contextvars(request_id=state.request.request_id)
        writer = PatientWriter(context, self._engine.settings.stall_timeout)
        state.stream.when_cut = writer.give_up
        ended: list[str] = []
        try:
            with self._counting(state, ended):
                seeded: set[int] = set()
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
            self._engine.close(state)
            self._closed(state, ended)
            state.group.disband()

    def _closed(self, state: RequestState, ended: list[str]) -> None:
        """Report the request's waiting times, in the log and to operators."""
        metrics = state.metrics(time.monotonic())
        output_tokens = state.num_output_tokens
        log.info(
            "request closed",
            prompt_tokens=len(state.request.prompt_token_ids),
            output_tokens=output_tokens,
            status=[sequence.status.name for sequence in state.group.sequences],
            **metrics.known(),
        )
        self._engine.finished.add(
            state.request.request_id,
            state.request.tenant,
            ended,
            len(state.request.prompt_token_ids),
            sum(output_tokens),
            metrics,
        )

    @contextlib.contextmanager
    def _counting(self, state: RequestState, ended: list[str]) -> Iterator[None]:
        """Counts the reasons why outputs ended; an output that its call cut off counts as an error or an abort."""
        statistics, num_outputs = self._engine.statistics, state.stream.num_open
        try:
            yield
            statistics.request_seconds.observe(time.monotonic() - state.group.arrived_at)
        except BaseException as error:
            failed = isinstance(error, RequestError) and error.code not in _CLIENTS_OWN
            ended += ["error" if failed else "abort"] * (num_outputs - len(ended))
            raise
        finally:
            statistics.num_outputs.update(ended)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        check_names(request)
        return pb.AbortResponse(aborted=self._engine.abort(request_key(request.tenant, request.request_id)))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        with self._side_calls.place():  # it may wait for the first worker
            model = await self._engine.model()
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
        with self._side_calls.place(_num_bytes(request)):
            response = pb.TokenizeResponse()
            fill_column(response, "token_ids", await encode_prompt(request, await self._engine.model()))
            return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        with self._side_calls.place(_num_bytes(request)):
            model = await self._engine.model()
            return pb.DetokenizeResponse(text=await decode_tokens(request, model))


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
