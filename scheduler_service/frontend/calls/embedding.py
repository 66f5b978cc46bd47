"""Serves Embed calls, which compute vectors of texts."""

from collections.abc import Iterator

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1 import sequence_group_pb2 as wire
from pagewire_common.calls.errors import PatientWriter, RequestError
from scheduler_service.core import PoolingParams, PoolingType
from scheduler_service.frontend.calls.generation import Context
from scheduler_service.frontend.calls.text_calls import TextCall
from scheduler_service.frontend.checking.checks import invalid
from scheduler_service.frontend.checking.text_items import encode_inputs, longest_input
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import served_fingerprint
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import MAX_VECTOR_BYTES, OutputDelta
from scheduler_service.wire.messages import decode_enum

MAX_STEP_BYTES = 16 << 20
"""Vector bytes of one step, if all its sequences have the same pooling parameters: 5 ms of the engine's time."""


async def embed(link: EngineLink, request: pb.EmbedRequest, context: Context) -> None:
    async with TextCall(link, request, context) as call:
        model = call.model
        pooling = read_pooling(request, model)
        writer = PatientWriter(context, link.stall_timeout)

        async def write(number: int, state: RequestState) -> None:
            state.stream.when_cut = writer.give_up
            async for delta in state.stream:
                for message in _messages(number, state, delta):
                    message.dimensions = pooling.dimensions
                    message.model_fingerprint = served_fingerprint(model, state.request.adapter_id)
                    await writer.write(message)

        try:
            await call.run(encode_inputs(request, model), pooling, write, longest_input(request))
        finally:
            writer.close()


def read_pooling(request: pb.EmbedRequest, model: ServedModel) -> PoolingParams:
    if not model.embedding_size:
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, "this model makes no vectors; see GetModel's tasks")
    if request.dimensions > model.embedding_size:
        invalid(f"dimensions is {request.dimensions}; this model's vectors have {model.embedding_size} numbers")
    for name, value, kind in (
        ("pooling", request.pooling, pb.Pooling),
        ("number_type", request.number_type, pb.NumberType),
    ):
        if value not in kind.values():
            invalid(f"{name} is {value}, which is none of {', '.join(kind.keys())}")
    if request.pooling:
        pooling_type = PoolingType[pb.Pooling.Name(request.pooling).removeprefix("POOLING_")]
    else:
        pooling_type = decode_enum(PoolingType, wire.PoolingType.DESCRIPTOR, model.pooling_type)
    pooling = PoolingParams(
        type=pooling_type,
        dimensions=request.dimensions or model.embedding_size,
        normalize=request.normalize if request.HasField("normalize") else model.normalizes,
        half=request.number_type == pb.NUMBER_TYPE_FLOAT16,
    )
    most = model.max_num_batched_tokens if pooling_type is PoolingType.ALL else model.max_num_seqs
    if (num_bytes := most * pooling.vector_bytes) > MAX_STEP_BYTES:
        invalid(
            f"a step of {most} vectors of {pooling.dimensions} numbers has {num_bytes >> 20} MiB, and "
            f"{MAX_STEP_BYTES >> 20} are sent at once; ask for fewer dimensions, for 16 bits, or for one vector a text"
        )
    return pooling


def _messages(number: int, state: RequestState, delta: OutputDelta) -> Iterator[pb.EmbedResponse]:
    """Split a text's new vectors into messages that any client accepts. The last message of a text has the usage."""
    for start in range(0, max(1, len(delta.vectors)), MAX_VECTOR_BYTES):
        message = pb.EmbedResponse(index=number, vectors=delta.vectors[start : start + MAX_VECTOR_BYTES])
        if delta.status is not None and start + MAX_VECTOR_BYTES >= len(delta.vectors):
            message.usage.prompt_tokens = state.request.num_prompt_tokens
            message.usage.cached_tokens = state.num_cached_tokens
        yield message
