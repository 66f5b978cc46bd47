"""Calls InferenceService in the front end's own process.

An HTTP request becomes the same calls as over gRPC, so both protocols have one check, one quota and one log line.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import grpc
import structlog

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.calls.generation import NO_CHAT, Answers, ChatOutput, allowed_model, generate
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tool_grammar import ModelTokens
from scheduler_service.frontend.chat.tool_grammars import ToolGrammars
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.http.chats.chat_answers import ChatAnswers, ChatDelta
from scheduler_service.frontend.http.images.fetching import Media
from scheduler_service.frontend.http.resuming.event_ids import Position
from scheduler_service.frontend.http.resuming.replay import Replay, Replayed
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.request_trace import CHAT, TEXT_COMPLETION
from scheduler_service.frontend.servicer import InferenceServicer, Messages

log = structlog.get_logger()

Metadata = Sequence[tuple[str, str]]
_INTERNAL = RequestError(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


Method = Callable[[Any, Any], Coroutine[Any, Any, None]]
T = TypeVar("T")
Streaming = AbstractAsyncContextManager[AsyncIterator[T]]


class _End(NamedTuple):
    """The end of a call, behind its last message."""

    error: RequestError | None


class LocalContext:
    """The part of gRPC's ServicerContext that InferenceService uses. `metadata`: the headers of the HTTP request.

    A message waits until the reader of the call has taken it, so a slow reader slows the call as over gRPC.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self.messages: asyncio.Queue[Any] = asyncio.Queue(1)

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def write(self, message: Any) -> None:
        await self.messages.put(message)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat. `syntax`: how the model writes reasoning and calls. `tools`: the tools that it may call.

    `drops_special`: the output is decoded with special tokens, which count as marks of the syntax alone.
    """

    asked: pb.GenerateRequest
    syntax: ChatSyntax
    tools: Sequence[Tool]
    output: ChatOutput = NO_CHAT
    drops_special: bool = False


class Service:
    """The methods of InferenceService, for HTTP requests of this process. `media`: fetches images; by default none."""

    def __init__(self, link: EngineLink, media: Media | None = None) -> None:
        self.link = link
        self.media = media or Media()
        self._servicer = InferenceServicer(link)
        self._grammars: dict[ChatSyntax, ToolGrammars] = {}  # the model's own, and that of a chat without its tools

    async def model(self) -> ServedModel:
        """The served model. Raises RequestError if no worker describes a model, or the API key may not use it."""
        if self.link.loading.model is None:
            with EngineCall(self.link) as call:
                await call.admit_side_call()  # limits the number of requests that wait for a worker
                return await allowed_model(self.link)
        return await allowed_model(self.link)

    def generate(
        self, request: pb.GenerateRequest, metadata: Metadata, position: Position | None = None
    ) -> Streaming[pb.GenerateResponse]:
        """Begin a Generate call. Yields the call's messages. When the block ends, so does the call.

        `position`: where a stream broke that the call repeats. One of the messages ends there.
        """

        async def method(asked: pb.GenerateRequest, context: Any) -> None:
            def answers(state: RequestState, model: ServedModel) -> Answers:
                return _arranged(Messages(state, model), state, model, position)

            await generate(self.link, asked, context, answers, operation=TEXT_COMPLETION)

        return _streaming(method, request, metadata)

    def embed(self, request: pb.EmbedRequest, metadata: Metadata) -> Streaming[pb.EmbedResponse]:
        """Begin an Embed call, as `generate`."""
        return _streaming(self._servicer.Embed, request, metadata)

    def transcribe(self, request: pb.TranscribeRequest, metadata: Metadata) -> Streaming[pb.TranscribeResponse]:
        """Begin a Transcribe call, as `generate`."""
        return _streaming(self._servicer.Transcribe, request, metadata)

    def chat(self, request: ChatRequest, metadata: Metadata, position: Position | None = None) -> Streaming[ChatDelta]:
        """Begin a Generate call whose outputs are parsed as assistants' messages, as `generate`."""

        async def method(asked: pb.GenerateRequest, context: Any) -> None:
            def answers(state: RequestState, model: ServedModel) -> Answers:
                special = model.tokenizer.special_tokens if request.drops_special and model.tokenizer else ()
                parsed = ChatAnswers(state, request.syntax, request.tools, special, _close_id(request.syntax, model))
                return _arranged(parsed, state, model, position)

            await generate(self.link, asked, context, answers, operation=CHAT, output=request.output)

        return _streaming(method, request.asked, metadata)

    def grammars(self, syntax: ChatSyntax, model: ServedModel) -> ToolGrammars:
        """The compiler of grammars for messages in a syntax."""
        if (found := self._grammars.get(syntax)) is None:
            found = self._grammars[syntax] = ToolGrammars(syntax, _model_tokens(syntax, model))
        return found

    async def score(self, request: pb.ScoreRequest, metadata: Metadata) -> pb.ScoreResponse:
        context: Any = LocalContext(metadata)
        return await self._servicer.Score(request, context)

    async def get_model(self, metadata: Metadata) -> pb.GetModelResponse:
        context: Any = LocalContext(metadata)
        return await self._servicer.GetModel(pb.GetModelRequest(), context)


def _arranged(answers: Answers, state: RequestState, model: ServedModel, position: Position | None) -> Answers:
    return answers if position is None else Replayed(answers, Replay(state, model, position))


@asynccontextmanager
async def _streaming(method: Method, request: Any, metadata: Metadata) -> AsyncIterator[AsyncIterator[Any]]:
    context = LocalContext(metadata)
    task = asyncio.create_task(_run(method, request, context))
    try:
        yield _read(context)
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _run(method: Method, request: Any, context: LocalContext) -> None:
    """Run a call, and put its end behind its messages."""
    error: RequestError | None = None
    try:
        await method(request, context)
    except RequestError as refusal:
        error = refusal
    except Exception:
        log.exception("call failed")
        error = _INTERNAL
    await context.messages.put(_End(error))


async def _read(context: LocalContext) -> AsyncIterator[Any]:
    """Yield the messages of a call. Raises the RequestError with which the call ends."""
    while not isinstance(message := await context.messages.get(), _End):
        yield message
    if message.error is not None:
        raise message.error


def _model_tokens(syntax: ChatSyntax, model: ServedModel) -> ModelTokens:
    if model.tokenizer is None:
        return ModelTokens()
    ids = model.tokenizer.added_tokens
    special = {text: ids[text] for text in model.tokenizer.special_tokens}
    return ModelTokens(special, _close_id(syntax, model), model.eos_token_ids)


def _close_id(syntax: ChatSyntax, model: ServedModel) -> int | None:
    """The token of the mark that closes reasoning; None if it is not a token."""
    if model.tokenizer is None or syntax.reasoning is None:
        return None
    return model.tokenizer.added_tokens.get(syntax.reasoning.close.strip())
