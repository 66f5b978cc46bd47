"""The lock of the HTTP API: TLS, and API keys as the scheduler has them; and the calls for sounds.

The gateway knows nothing of keys and TLS: it speaks to schedulers in plain text, and passes on nothing that says whose
a request is. So it stands between two ends of this process. The front one ends HTTP, asks the scheduler whether the key
is one, and gives the request a random id, which the gateway keeps. The back one speaks gRPC with the gateway, on this
machine alone, and finds by that id which key to show the scheduler. Clients see the ids in their answers, and can name
one in a request, so each opens one call. What to refuse is decided by the scheduler. Of the gateway's routes only those
pass that are listed here, because others reach further than the scheduler. Sounds go to the scheduler without it.
"""

import asyncio
import contextlib
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from aiohttp import web
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from yarl import URL

from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import http_transcriptions
from pagewire_client.channel import connect, key_metadata
from pagewire_common.tls import TlsFolder

OPEN_PATHS = ("/health", "/liveness", "/readiness")
ROUTES = re.compile(r"GET /v1/models(/[\w.%-]+)?|POST /v1/(chat/completions|completions|embeddings|tokenize)")
LOOK_SECONDS = 1.0
BODY_SECONDS = 60.0
"""That a client has for a request's body."""
_SERVICE = "/vllm.grpc.engine.VllmEngine/"
_OWN_METHODS = frozenset(
    f"{_SERVICE}{name}" for name in ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer")
)
"""What the gateway asks for itself."""
_REQUESTS: dict[str, Any] = {
    f"{_SERVICE}Generate": vllm.GenerateRequest,
    f"{_SERVICE}Embed": vllm.EmbedRequest,
}
_ID_BYTES = 16
_HOP_BY_HOP = frozenset(
    ("connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
_TRACE = ("traceparent", "tracestate")
_KEPT = frozenset(("accept", "content-type", "user-agent", *_TRACE))
"""Of a request's headers: all that the gateway needs."""
_STATUSES = {
    grpc.StatusCode.UNAUTHENTICATED: (401, "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_denied"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_exceeded"),
}
_LONGEST = 64 << 20
OPTIONS = (("grpc.max_receive_message_length", _LONGEST), ("grpc.max_send_message_length", _LONGEST))


@dataclass(slots=True)
class _Request:
    """One under way: its client's key, and once it was generated for, its whole id."""

    key: str
    request_id: str = ""


class Edge:
    """Both ends, for the scheduler at `target`. `api_key` is for what the gateway asks for itself.

    Create it inside the event loop; `start` before the gateway is started with `target` as its scheduler, and
    `serve_http` when it is there. Bodies have at most `most_bytes`.
    """

    def __init__(self, target: str, *, most_bytes: int, api_key: str = "", tls: Path | None = None) -> None:
        self._scheduler = connect(target, tls)
        self._own = api_key
        self._most_bytes = most_bytes
        self._requests: dict[str, _Request] = {}  # by the ids that they were given
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((_Relay(self._relay),))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._gateway = ""
        self._session: aiohttp.ClientSession
        self._runner: web.AppRunner | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
            await self._session.close()
        await self._server.stop(None)
        await self._scheduler.close()

    # ---- to the scheduler

    async def _relay(self, method: str, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Pass a call on with the key of its request, or the gateway's own."""
        first = await anext(messages, b"")
        if (key := self._key_of(method, first)) is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is for the gateway's own calls")
        send: Any = self._scheduler.unary_stream(method)  # each of these methods has one request
        trace = [(name, value) for name, value in context.invocation_metadata() if name in _TRACE]
        call = send(first, metadata=(*(key_metadata(key or "") or ()), *trace))
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()

    def _key_of(self, method: str, message: bytes) -> str | None:
        """None where there is none to show: the port is open to every process of this machine."""
        if method in _OWN_METHODS:
            return self._own
        if method in _REQUESTS:
            request_id = _REQUESTS[method].FromString(message).request_id
            request = self._requests.get(request_id[: 2 * _ID_BYTES])
            if request is None or request.request_id:
                return None
            request.request_id = request_id
            return request.key
        if method == f"{_SERVICE}Abort":
            (request_id,) = vllm.AbortRequest.FromString(message).request_ids[:1] or ("",)
            request = self._requests.get(request_id[: 2 * _ID_BYTES])
            return request.key if request is not None and request.request_id == request_id else None
        return None

    # ---- HTTP

    async def serve_http(self, host: str, port: int, gateway: str, tls: TlsFolder | None = None) -> None:
        """Serve there what the gateway at this URL serves. Raises OSError when the address cannot be had."""
        self._gateway = gateway
        no_limit = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            timeout=no_limit, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )
        app = web.Application(client_max_size=self._most_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False)
        await self._runner.setup()
        context = None if tls is None else tls.server_context(mutual=False)
        await web.TCPSite(self._runner, host, port, ssl_context=context).start()
        if tls is not None and context is not None:
            self._renewing = asyncio.create_task(_renew(tls, context))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if path in OPEN_PATHS and request.method in ("GET", "HEAD"):
            return await self._forward(request, path, b"", "")
        key = _bearer(request.headers.getall("Authorization", []))
        is_generation = path.endswith(("completions", "embeddings"))  # the scheduler counts it when it comes
        check: Any = self._scheduler.unary_unary(f"{_SERVICE}{'HealthCheck' if is_generation else 'GetModelInfo'}")
        try:
            answer = await check(b"", metadata=key_metadata(key))
        except grpc.aio.AioRpcError as error:
            status, name = _STATUSES.get(error.code(), (503, "service_unavailable"))
            return _error(status, name, error.details() or "")
        if request.method == "POST" and path in http_transcriptions.PATHS:
            served = vllm.GetModelInfoResponse.FromString(answer).served_model_name
            return await self._transcribe(request, key, served)
        if not ROUTES.fullmatch(f"{request.method} {path}"):
            return _error(404, "not_found", f"{request.method[:20]} {path[:100]} is not served here")
        if "Content-Encoding" in request.headers:
            return _error(415, "unsupported", "send the body as it is, without Content-Encoding")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            return _error(408, "timeout", f"the body did not come within {BODY_SECONDS:g} s")
        name = secrets.token_hex(_ID_BYTES)
        self._requests[name] = _Request(key)
        try:
            return await self._forward(request, path, body, name)
        finally:
            del self._requests[name]

    async def _transcribe(self, request: web.Request, key: str, served: str) -> web.StreamResponse:
        """The gateway has no such call for the models that there are, so the scheduler is asked."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                form = await http_transcriptions.read_form(request)
        except TimeoutError:
            return _error(408, "timeout", f"the body did not come within {BODY_SECONDS:g} s")
        except ValueError as error:  # also aiohttp's, of a body that is no form
            return _error(400, "invalid_request", str(error)[:300])
        if form.model not in ("", served):
            return _error(404, "model_not_found", f"model is {form.model[:100]!r}; it must be {served!r} here")
        call = InferenceServiceStub(self._scheduler).Transcribe(form.asked, metadata=key_metadata(key))
        try:
            return await http_transcriptions.answer(request, call, form)
        except grpc.aio.AioRpcError as error:
            status, code = http_transcriptions.status_of(error)
            if not status:
                status, code = _STATUSES.get(error.code(), (503, "service_unavailable"))
            return _error(status, code, error.details() or "")
        finally:
            call.cancel()

    async def _forward(self, request: web.Request, path: str, body: bytes, name: str) -> web.StreamResponse:
        """The gateway's answer, as it comes. When the client leaves, the gateway is left as well."""
        headers = {field: value for field, value in request.headers.items() if field.lower() in _KEPT}
        if name:
            headers["X-Request-Id"] = name
        url = URL(f"{self._gateway}{path}", encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            kept = {field: value for field, value in answer.headers.items() if _is_for_clients(field.lower())}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


class _Relay(grpc.GenericRpcHandler):
    """Takes calls of every name, whose messages stay bytes."""

    def __init__(self, relay: Callable[[str, AsyncIterator[bytes], Any], AsyncIterator[bytes]]) -> None:
        self._relay = relay

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def call(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in self._relay(method, messages, context):
                yield message

        return grpc.stream_stream_rpc_method_handler(call)


def _is_for_clients(header: str) -> bool:
    """Not those that say where the gateway's backend is."""
    return header not in _HOP_BY_HOP and not header.startswith("x-smg-")


def _bearer(values: Sequence[str]) -> str:
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" and key.isascii() and key.isprintable() else ""


def _error(status: int, code: str, message: str) -> web.Response:
    """As OpenAI's API has errors."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return web.json_response(body, status=status)


async def _renew(tls: TlsFolder, context: ssl.SSLContext) -> None:
    """Have new connections use changed certificates, until cancelled."""
    loaded = tls.refresh()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if (generation := tls.refresh()) != loaded:
            with contextlib.suppress(OSError):  # they change at this moment
                tls.load_own(context)
                loaded = generation
