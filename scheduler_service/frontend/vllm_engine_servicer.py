"""The service of vLLM's engine protocol (vllm.grpc.engine.VllmEngine), for gateways that serve OpenAI's HTTP API."""

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Mapping

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls import errors
from pagewire_common.calls.patient_writer import PatientWriter
from pagewire_common.vllm_metadata import CHAT_ID, LORA_NAME
from scheduler_service.access.audit import note
from scheduler_service.access.caller import tenant_of
from scheduler_service.frontend.calls.embedding import embed_one
from scheduler_service.frontend.calls.generation import Context, allowed_model, generate
from scheduler_service.frontend.checking.checks import check_length, invalid
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.output.request import request_key
from scheduler_service.frontend.output.request_trace import CHAT, TEXT_COMPLETION
from scheduler_service.frontend.vllm_engine_codec import StreamedAnswers, WholeAnswers, decode_request
from scheduler_service.wire.front_end import floats

PARSED_ID_BYTES = 8
"""Bytes of memory of a token id in a parsed message. gRPC keeps the parsed message while the call is open."""
CHUNK_BYTES = 1 << 20
MAX_ABORTS = 128
"""Largest number of requests that one Abort call may end."""


class VllmEngine(VllmEngineServicer):
    """Implements Generate, Embed, Abort, and the methods that a gateway calls when it starts.

    Other methods return UNIMPLEMENTED.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._started_at = time.monotonic()
        self._archive: tuple[bytes, str] | None = None  # the zip archive of the model's files, and its SHA-256

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        ours = decode_request(request)
        ours.lora_name = _lora_name(context)
        await generate(
            self._link,
            ours,
            context,
            lambda state, _: StreamedAnswers(state) if request.stream else WholeAnswers(state),
            operation=CHAT if request.request_id.startswith(CHAT_ID) else TEXT_COMPLETION,
            is_whole=not request.stream,
            num_bytes=errors.request_size.get() + PARSED_ID_BYTES * len(request.tokenized.input_ids),
        )

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        ours = pb.EmbedRequest()
        ours.inputs.add().token_ids.ids.MergeFrom(request.tokenized.input_ids)
        vector, num_tokens = await embed_one(self._link, ours, context)
        numbers = floats(vector)
        return vllm.EmbedResponse(embedding=numbers, prompt_tokens=num_tokens, embedding_dim=len(numbers))

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        note(request_id=" ".join(request.request_ids[:MAX_ABORTS]))
        check_length("request_ids", len(request.request_ids), MAX_ABORTS)
        with EngineCall(self._link) as call:
            await call.admit_side_call()
            for request_id in request.request_ids:
                await self._link.abort(request_key(tenant_of(""), request_id))
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        message = "" if self._link.serving else "no worker takes requests"
        return vllm.HealthCheckResponse(healthy=self._link.serving, message=message)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call()  # admitted first, because the call may wait for a worker
            model = await allowed_model(self._link)
        config = json.loads(model.files.get("config.json", b"{}"))
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            is_generation=model.generates,
            max_context_length=model.context_length,
            max_req_input_len=model.context_length - 1,
            vocab_size=model.vocabulary_size,
            model_type=config.get("model_type", ""),
            architectures=config.get("architectures", []),
            eos_token_ids=model.eos_token_ids,
            default_sampling_params_json=json.dumps(model.defaults.sampling_params()),
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        with EngineCall(self._link) as call:
            await call.admit_side_call()
            model = await allowed_model(self._link)
        return vllm.GetServerInfoResponse(
            active_requests=len(self._link.requests.by_call),
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=model.block_size,
            model_dtype=f"torch.{model.dtype}",
            max_num_seqs=model.max_num_seqs,
        )

    async def GetTokenizer(  # a PatientWriter limits the time of a write
        self, request: common.GetTokenizerRequest, context: Context
    ) -> None:
        """Send the model's files without weights, as a zip archive. The last message has the archive's SHA-256."""
        with EngineCall(self._link) as call:
            await call.admit_side_call(2 * CHUNK_BYTES)  # an upper bound of the bytes on their way to the client
            model = await allowed_model(self._link)
            if self._archive is None:
                self._archive = await asyncio.to_thread(_zipped, model.files)
            data, digest = self._archive
            writer = PatientWriter(context, self._link.stall_timeout)
            try:
                for start in range(0, len(data), CHUNK_BYTES):
                    piece = data[start : start + CHUNK_BYTES]
                    is_last = start + CHUNK_BYTES >= len(data)
                    await writer.write(common.GetTokenizerChunk(data=piece, sha256=digest if is_last else ""))
            finally:
                writer.close()


def _lora_name(context: Context) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == LORA_NAME and isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                invalid(f"{LORA_NAME} is not UTF-8")
    return ""


def _zipped(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, compresslevel=1)
    data = target.getvalue()
    return data, hashlib.sha256(data).hexdigest()
