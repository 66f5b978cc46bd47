"""The two proxies around the gateway. The proxies provide TLS, API keys, and the routes that the gateway lacks.

The gateway supports neither API keys nor TLS: it calls schedulers in plain text and forwards no credentials. To add API
keys and TLS, this process has a proxy on each side of the gateway.

The front proxy receives HTTP requests and has the scheduler check the API key. The front proxy gives each request a
random id. The gateway sends this id with its call to the scheduler. The back proxy accepts gRPC from the gateway, on
this machine only. The back proxy finds the request's API key by the id.

Clients see these ids in their answers, and can name such an id in a request. So that a client cannot use another
client's API key in this way, each id is valid for only one call. The scheduler decides which requests are refused. Only
the gateway routes in ROUTES are forwarded, because other routes reach beyond the scheduler. The routes of OWN call the
scheduler without the gateway.
"""

import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import structlog
from aiohttp import web
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from yarl import URL

from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.channel import key_metadata
from pagewire_client.http import vectors
from pagewire_client.http.call import Call, Held, Room, end, read_body, write
from pagewire_client.http.completions import complete
from pagewire_client.http.errors import HttpError, refused_by, sentence_of
from pagewire_client.http.limits import Limits
from pagewire_client.http.models import models
from pagewire_client.http.port import Port
from pagewire_client.http.special_tokens import PARSE, SpecialTokens, token_ids_of
from pagewire_client.http.token_texts import TokenTexts
from pagewire_client.http.transcriptions import PATHS, transcribe
from pagewire_client.http.unread import Unread, read_object, take_out, write_object
from pagewire_client.http.upstream import Upstream
from pagewire_common.connection.tls import OPEN, Security
from pagewire_common.vllm_metadata import CHAT_ID

log = structlog.get_logger()

OPEN_PATHS = ("/health", "/liveness", "/readiness")
ROUTES = ("POST /v1/chat/completions", "POST /v1/tokenize")
"""The gateway's routes that clients may use."""
OWN: dict[str, Callable[[Call], Awaitable[web.StreamResponse]]] = {
    "POST /v1/completions": complete,
    "POST /v1/embeddings": vectors.embeddings,
    "POST /v1/rerank": vectors.rerank,
    "POST /v1/score": vectors.score,
    **{f"POST {path}": transcribe for path in PATHS},
}
_MODELS = re.compile(r"GET /v1/models(/.+)?")
HELD_BYTES = 256 << 20
"""Maximum size in bytes of all requests and answers in flight. A sound counts up to three times, because memory holds
up to three copies."""
_SERVICE = "/vllm.grpc.engine.VllmEngine/"
_OWN_METHODS = frozenset(
    f"{_SERVICE}{name}" for name in ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer")
)
"""Methods that the gateway calls for its own use, without a client's request."""
_GENERATE = f"{_SERVICE}Generate"
_NOTHING = Unread()
DEFAULTS = Limits()
LINGER_SECONDS = 10.0
"""Seconds in which the server receives and drops the rest of the body of a refused request."""
_ID_BYTES = 16
_NAME_LENGTH = len(CHAT_ID) + 2 * _ID_BYTES
_HOP_BY_HOP = frozenset(
    ("connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
_TRACE = ("traceparent", "tracestate")
_KEPT = frozenset(("accept", "content-type", "user-agent", *_TRACE))
"""Headers of a request that are forwarded to the gateway. The gateway uses no other headers of requests."""
_LONGEST = 64 << 20
OPTIONS = (("grpc.max_receive_message_length", _LONGEST), ("grpc.max_send_message_length", _LONGEST))


@dataclass(slots=True)
class _Request:
    """One request in flight: the client's key and trace. After the request's Generate call, the object also contains
    the request's full id."""

    key: str
    unread: Unread = _NOTHING
    trace: Sequence[tuple[str, str]] = ()
    request_id: str = ""


class Edge:
    """The front proxy and the back proxy in one object. `target` is the scheduler's address, and `model` is the name of
    the scheduler's model.

    `api_key` is for calls of the gateway and of this process: for the model's files and for token texts.

    Create the object inside the event loop. Call `start` before the gateway starts. The attribute `target` is the
    address that the gateway uses as its scheduler. Call `serve_http` after the gateway has started. Raises StartError
    if the certificates in the folder `tls` cannot be used.
    """

    def __init__(
        self, target: str, model: str, limits: Limits = DEFAULTS, *, api_key: str = "", tls: Path | None = None
    ) -> None:
        self._scheduler = Upstream(target, tls)
        self._model = model
        self._limits = limits
        self._room = Room(HELD_BYTES)
        self._texts = TokenTexts()
        self._special = SpecialTokens()
        self._own = api_key
        self._requests: dict[str, _Request] = {}  # by id
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((_Relay(self._relay),))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._gateway = ""
        self._session: aiohttp.ClientSession
        self._runner: web.AppRunner | None = None
        self._port: Port | None = None

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        if self._port is not None:
            self._port.close()
        if self._runner is not None:
            await self._runner.cleanup()
            await self._session.close()
        await self._server.stop(None)
        await self._scheduler.close()

    # ---- to the scheduler

    async def _relay(self, method: str, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Forward a call of the gateway. The forwarded call has the API key of its HTTP request, or this process's own
        key."""
        first = await anext(messages, b"")
        if (found := self._owner_of(method, first)) is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is for the gateway's own calls")
            return
        key, unread, trace = found.key, found.unread, found.trace
        # If the gateway exports spans, its span is a child of the client's span.
        trace = [(name, value) for name, value in context.invocation_metadata() if name in _TRACE] or trace
        async with self._scheduler.channel() as channel:
            send: Any = channel.unary_stream(method)  # no method streams requests
            call = send(unread.put_into(first), metadata=(*(key_metadata(key) or ()), *trace, *unread.metadata()))
            try:
                async for message in call:
                    yield message
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), sentence_of(error))
            finally:
                call.cancel()

    def _owner_of(self, method: str, message: bytes) -> _Request | None:
        """The HTTP request in flight to which a call of the gateway belongs. The result contains the client's API key,
        and the fields that bypass the gateway.

        Returns None if the call belongs to no request in flight: every process of this machine can connect to the back
        proxy's port.
        """
        if method in _OWN_METHODS:
            return _Request(self._own)
        if method == _GENERATE:
            request_id = vllm.GenerateRequest.FromString(message).request_id
            request = self._requests.get(request_id[:_NAME_LENGTH])
            if request is None or request.request_id:
                return None
            request.request_id = request_id
            return request
        if method == f"{_SERVICE}Abort":
            (request_id,) = vllm.AbortRequest.FromString(message).request_ids[:1] or ("",)
            request = self._requests.get(request_id[:_NAME_LENGTH])
            return _Request(request.key) if request is not None and request.request_id == request_id else None
        return None

    # ---- HTTP

    async def serve_http(self, host: str, port: int, gateway: str, security: Security = OPEN) -> None:
        """Serve HTTP at `host` and `port`, for the gateway at the URL `gateway`.

        Raises OSError if the address is in use, and StartError if the certificates cannot be used.
        """
        self._gateway = gateway
        no_limit = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            timeout=no_limit, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )
        app = web.Application(client_max_size=self._limits.most_sound_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # aiohttp's logger would print a traceback for each client that disconnects or sends invalid HTTP.
        quiet = logging.getLogger("pagewire.http")
        quiet.setLevel(logging.CRITICAL)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            logger=quiet,
            # A connection is closed if it has no request in flight, or incomplete headers, for this time.
            keepalive_timeout=self._limits.receive_seconds,
            lingering_time=min(LINGER_SECONDS, self._limits.receive_seconds),
        )
        await self._runner.setup()
        self._port = Port(self._runner, security, self._limits.max_connections)
        await self._port.open(host, port)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            async with self._scheduler.channel() as scheduler:
                with Held(self._room) as held:
                    return await self._answer(request, scheduler, held)
        except HttpError as error:
            return error.response()
        except ConnectionError:  # the client has disconnected, or does not read
            raise
        except Exception:
            log.exception("a call over HTTP failed")
            raise

    async def _answer(self, request: web.Request, scheduler: grpc.aio.Channel, held: Held) -> web.StreamResponse:
        """Answer a request. Raises HttpError if no part of the answer was sent."""
        path = request.rel_url.raw_path
        if path in OPEN_PATHS and request.method in ("GET", "HEAD"):
            return await self._forward(request, path)
        key = _bearer(request.headers.getall("Authorization", []))
        route = f"{request.method} {path}"
        own = models if _MODELS.fullmatch(route) else OWN.get(route)
        # Requests to these routes become scheduler calls with the client's key, so the scheduler counts them for the
        # client's quota.
        is_counted = own is not None or path.endswith("completions")
        check: Any = scheduler.unary_unary(f"{_SERVICE}{'HealthCheck' if is_counted else 'GetModelInfo'}")
        try:
            await check(b"", metadata=key_metadata(key))
            if own is not None:
                call = Call(
                    request,
                    InferenceServiceStub(scheduler),
                    (*(key_metadata(key) or ()), *_trace(request)),
                    key_metadata(self._own),
                    self._model,
                    held,
                    self._limits.most_sound_bytes if own is transcribe else self._limits.most_bytes,
                    self._limits.receive_seconds,
                    self._texts,
                )
                return await own(call)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                sentence = f"there is no model or adapter of this name; the model is {self._model!r}"
                raise HttpError(404, "model_not_found", sentence) from None
            raise refused_by(error) from None
        if route not in ROUTES:
            raise HttpError(404, "not_found", f"{route[:120]} is not served here")
        body = await read_body(request, held, self._limits.most_bytes, self._limits.receive_seconds)
        unread = _NOTHING
        if is_counted:
            body, unread = await self._read_chat(body, scheduler, key)
        name = CHAT_ID + secrets.token_hex(_ID_BYTES)
        self._requests[name] = _Request(key, unread, _trace(request))
        try:
            return await self._forward(request, path, body, name, unread)
        finally:
            del self._requests[name]

    async def _read_chat(self, body: bytes, scheduler: grpc.aio.Channel, key: str) -> tuple[bytes, Unread]:
        """The body for the gateway, and the fields that bypass the gateway.

        If the scheduler encodes the chat, the chat counts as two calls of the client. Raises HttpError.
        """
        fields = read_object(body)
        parses = fields.pop(PARSE, False)
        fields.pop("rid", None)  # the gateway would use the client's `rid` as the request's id
        unread = take_out(fields, self._model)
        try:
            if parses is not True:
                await self._special.learn(scheduler, key_metadata(self._own))
                if spelled := self._special.spelled_in(fields):
                    tokenize = InferenceServiceStub(scheduler).Tokenize
                    token_ids = await token_ids_of(fields, spelled, tokenize, key_metadata(key))
                    unread = replace(unread, token_ids=token_ids)
        except grpc.aio.AioRpcError as error:
            raise refused_by(error) from None
        return write_object(fields), unread

    async def _forward(
        self, request: web.Request, path: str, body: bytes = b"", name: str = "", unread: Unread = _NOTHING
    ) -> web.StreamResponse:
        """Stream the gateway's answer. If the client disconnects, the connection to the gateway is closed."""
        headers = {field: value for field, value in request.headers.items() if field.lower() in _KEPT}
        if name:
            headers["X-Request-Id"] = name
        url = URL(f"{self._gateway}{path}", encoded=True)
        asked = self._session.request(request.method, url, headers=headers, data=body, allow_redirects=False)
        try:
            answer = await asked
        except aiohttp.ClientConnectionError:
            raise HttpError(503, "service_unavailable", "the gateway does not answer") from None
        async with answer:
            kept = {field: value for field, value in answer.headers.items() if _is_for_clients(field.lower())}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            rest = b""
            async for piece in answer.content.iter_any():
                piece, rest = unread.named_in(rest + piece, self._model)
                await write(response, piece)
            await write(response, rest)
            await end(response)
            return response


class _Relay(grpc.GenericRpcHandler):
    """Accepts calls of every method. Messages are forwarded as bytes, without parsing."""

    def __init__(self, relay: Callable[[str, AsyncIterator[bytes], Any], AsyncIterator[bytes]]) -> None:
        self._relay = relay

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def call(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in self._relay(method, messages, context):
                yield message

        return grpc.stream_stream_rpc_method_handler(call)


def _is_for_clients(header: str) -> bool:
    """Whether a header may be sent to clients. Some headers reveal the gateway's backend."""
    return header not in _HOP_BY_HOP and not header.startswith("x-smg-")


def _trace(request: web.Request) -> list[tuple[str, str]]:
    """The HTTP client's trace context, as gRPC metadata."""
    given = ((name, request.headers.get(name, "")) for name in _TRACE)
    return [(name, value) for name, value in given if re.fullmatch(r"[ -~]{1,512}", value)]


def _bearer(values: Sequence[str]) -> str:
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" and key.isascii() and key.isprintable() else ""
