"""The service InferenceService: converts protobuf messages to checked requests, and deltas of outputs to messages."""

import time

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceServicer
from pagewire_common.calls.request_limits import request_size
from pagewire_common.sampling import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from scheduler_service.access.audit import note
from scheduler_service.access.caller import caller, tenant_of
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.calls.embedding import embed
from scheduler_service.frontend.calls.generation import Context, allowed_model, generate
from scheduler_service.frontend.calls.scoring import score
from scheduler_service.frontend.calls.transcription import transcribe
from scheduler_service.frontend.checking.checks import check_names
from scheduler_service.frontend.checking.prompt import decode_tokens, encode_prompt
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import failure, request_key, served_fingerprint
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.request_trace import CHAT, TEXT_COMPLETION
from scheduler_service.frontend.output.streams import OutputDelta
from scheduler_service.wire.messages import fill_column

_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: pb.FINISH_REASON_STOP,
    SequenceStatus.FINISHED_LENGTH_CAPPED: pb.FINISH_REASON_LENGTH,
    SequenceStatus.FINISHED_ABORTED: pb.FINISH_REASON_ABORT,
    SequenceStatus.FINISHED_FAILED: pb.FINISH_REASON_ERROR,
    SequenceStatus.FINISHED_BARRED: pb.FINISH_REASON_ERROR,
}


class InferenceServicer(InferenceServiceServicer):
    def __init__(self, link: EngineLink) -> None:
        self._link = link

    async def Generate(  # type: ignore[override]  # a PatientWriter limits the time of a write
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        operation = CHAT if request.HasField("chat") else TEXT_COMPLETION
        await generate(self._link, request, context, Messages, operation=operation)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        note(request_id=request.request_id)
        check_names(request)
        key = request_key(tenant_of(request.tenant), request.request_id)
        with EngineCall(self._link) as call:
            await call.admit_side_call()
            return pb.AbortResponse(aborted=await self._link.abort(key))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call()  # admitted first, because the call may wait for a worker
            model = await allowed_model(self._link)
        key = caller.get()
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
            tasks=model.tasks,
            embedding_size=model.embedding_size,
            prompt_embeds_size=model.prompt_embeds_size,
            lora_names=[name for name in self._link.adapter_names if key is None or key.may_name(name)],
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call(_num_bytes(request))
            response = pb.TokenizeResponse()
            prompt = await encode_prompt(request, await allowed_model(self._link))
            fill_column(response, "token_ids", prompt.token_ids)
            return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call(_num_bytes(request))
            return await decode_tokens(request, await allowed_model(self._link))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> None:  # type: ignore[override]  # as Generate
        await embed(self._link, request, context)

    async def Transcribe(  # type: ignore[override]  # as Generate
        self, request: pb.TranscribeRequest, context: Context
    ) -> None:
        await transcribe(self._link, request, context)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        return await score(self._link, request, context)


def _num_bytes(request: pb.TokenizeRequest | pb.DetokenizeRequest) -> int:
    return max(request_size.get(), request.ByteSize())


class Messages:
    """Converts each delta to a message. An output's first message also has the data for resuming."""

    def __init__(self, state: RequestState, model: ServedModel) -> None:
        self._state = state
        self._model = model
        self._begun: set[int] = set()

    def encode(self, delta: OutputDelta) -> tuple[pb.GenerateResponse]:
        message = encode_delta(self._state, delta)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            message.seed = self._state.request.sampling.seed
            message.model_fingerprint = served_fingerprint(self._model, self._state.request.adapter_id)
        return (message,)


def encode_delta(state: RequestState, delta: OutputDelta) -> pb.GenerateResponse:
    """Convert a delta to a message. An output's last message has the finish reason and usage."""
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
        if (error := failure(state.request.sampling, delta.status)) is not None:
            message.error.code, message.error.message = error.code.value[0], str(error)
        if isinstance(delta.stop, str):
            message.stop_string = delta.stop
        elif delta.stop is not None:
            message.stop_token_id = delta.stop
        message.usage.prompt_tokens = state.request.num_prompt_tokens
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
