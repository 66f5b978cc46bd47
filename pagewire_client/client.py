"""The asyncio client: the generated stub with prompts as Python values and calls that end when their reader does."""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with "role" and "content"."""

OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_receive_message_length", 64 << 20),
)


class Client:
    """One connection to a scheduler service. Create it inside the event loop that uses it.

    Every method raises grpc.aio.AioRpcError with the server's status and sentence.
    """

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._stub = InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def wait_until_serving(self, timeout: float | None = None) -> None:
        """Return once the server reports SERVING; raises TimeoutError after `timeout` seconds."""
        watch = self._health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=timeout)
        try:
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            raise TimeoutError(f"the server was not ready within {timeout} s") from None
        finally:
            watch.cancel()

    async def generate(
        self,
        prompt: Prompt,
        sampling: pb.SamplingParams | None = None,
        *,
        request_id: str = "",
        parse_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream a prompt's continuation. Leaving the loop early, by whatever way, frees it on the server."""
        request = pb.GenerateRequest(
            request_id=request_id, sampling=sampling, parse_special_tokens=parse_special_tokens
        )
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt and isinstance(prompt[0], Mapping):
            request.chat.CopyFrom(to_chat(prompt))  # type: ignore[arg-type]
        else:
            request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
            request.token_ids.SetInParent()
        call = self._stub.Generate(request, timeout=timeout)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """End a call in flight; returns whether there was one."""
        return (await self._stub.Abort(pb.AbortRequest(request_id=request_id))).aborted

    async def get_model(self) -> pb.GetModelResponse:
        return await self._stub.GetModel(pb.GetModelRequest())

    async def tokenize(self, text: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text or of chat messages, as `generate` would see them."""
        request = pb.TokenizeRequest(text=text) if isinstance(text, str) else pb.TokenizeRequest(chat=to_chat(text))
        return list((await self._stub.Tokenize(request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._stub.Detokenize(request)).text


def to_chat(messages: Sequence[Mapping[str, str]]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages])
