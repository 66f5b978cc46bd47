"""The HTTP server of a front end: finds the caller and the route of each request, and turns errors into answers.

The front ends share the HTTP port, as they share the gRPC port.
"""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from pagewire_common.calls.errors import RequestError
from pagewire_common.calls.request_limits import request_size
from pagewire_common.connection.tls import OPEN, Security
from pagewire_common.serving.listening import cannot_listen
from scheduler_service.access.audit import Lines, begin_line
from scheduler_service.access.caller import caller
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.cors import Origins
from scheduler_service.frontend.http.errors import RETRY_AFTER, HttpError, grpc_name, http_status, invalid, refused_by
from scheduler_service.frontend.http.images.fetching import Media
from scheduler_service.frontend.http.limits import Held, Limits, Room, client_of
from scheduler_service.frontend.http.page.routes import Page
from scheduler_service.frontend.http.port import Port, Runner
from scheduler_service.frontend.http.resuming.event_ids import HEADER
from scheduler_service.frontend.http.routes import RESUMABLE, Api, find_api, find_route
from scheduler_service.frontend.http.service import Metadata, Service
from scheduler_service.frontend.http.token_texts import TokenTexts
from scheduler_service.frontend.http.writing import answer_whole
from scheduler_service.frontend.link.engine_link import EngineLink

log = structlog.get_logger()

LINGER_SECONDS = 10.0
"""Seconds in which the server receives and drops the rest of the body of a refused request."""
STOP_SECONDS = 1.0
"""Seconds for open connections at the end of the front end. All streams have ended before."""
MAX_SHOWN = 120
"""Characters of an unknown route in an error and in the log."""
CLIENT_GONE = 499
"""The status in the log of a request whose client has disconnected, as nginx logs it."""
REQUEST_ID = "X-Request-Id"
_NAME = web.RequestKey("name", str)
_HAS_BEGUN = web.RequestKey("has begun", bool)
_TRACE = ("traceparent", "tracestate")
_PRINTABLE = re.compile(r"[ -~]{1,512}")


class HttpServer:
    """Serves HTTP for the engine behind `link`, from `start` to `stop`. Create the server inside the event loop.

    `media_hosts`: hosts from which images are fetched.
    """

    def __init__(
        self,
        link: EngineLink,
        limits: Limits,
        security: Security = OPEN,
        origins: Origins | None = None,
        *,
        has_page: bool = True,
        media_hosts: Collection[str] = (),
    ) -> None:
        self._link, self._limits, self._security = link, limits, security
        self._page = Page(link) if has_page else None
        self._origins = origins or Origins()
        self._service = Service(link, Media(media_hosts))
        self._room = Room()
        self._texts = TokenTexts()
        self._lines = Lines()
        self._is_alive = True
        self._is_closing = False
        self._num_open = 0
        self._is_idle = asyncio.Event()
        # A middleware, because no pattern of a route fits every path. Each route limits its own body.
        app = web.Application(middlewares=(self._handle,), client_max_size=1 << 30)
        app.on_response_prepare.append(self._prepare)
        # aiohttp's logger would print a traceback for each client that disconnects or sends invalid HTTP.
        quiet = logging.getLogger("pagewire.http")
        quiet.setLevel(logging.CRITICAL)
        self._runner = Runner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            logger=quiet,
            keepalive_timeout=limits.receive_seconds,  # limits also the time of a request's head
            lingering_time=min(LINGER_SECONDS, limits.receive_seconds),
            shutdown_timeout=STOP_SECONDS,
        )
        self._port: Port | None = None

    async def start(self, listen: str) -> None:
        """Serve at HOST:PORT. Raises StartError if the address or the certificates cannot be used."""
        await self._runner.setup()
        self._port = Port(self._runner, self._security, self._limits.max_connections)
        host, _, port = listen.rpartition(":")
        try:
            await self._port.open(host.strip("[]"), int(port))
        except OSError as error:
            raise cannot_listen(listen, "--http-listen") from error

    async def close(self, seconds: float) -> None:
        """Accept no further connections, and stop when no request is open, at the latest after `seconds`."""
        self._is_closing = True
        self._link.feed.end_all()
        if self._port is not None:
            await self._port.close()
            self._port = None
        if self._num_open:
            self._is_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), seconds)
        await self.stop()

    async def _prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        await _echo_id(request, response)
        response.headers.update(self._origins.headers(request))
        if self._is_closing:
            response.force_close()

    async def stop(self) -> None:
        if self._port is not None:
            await self._port.close()
            self._port = None
        await self._runner.cleanup()

    def set_alive(self, alive: bool) -> None:
        """Set whether /health answers 200."""
        self._is_alive = alive

    def _probe(self, request: web.Request) -> web.Response | None:
        """The answer to a health probe, which needs no API key; None for any other request."""
        if request.method not in ("GET", "HEAD"):
            return None
        match request.rel_url.raw_path:
            case "/health" | "/liveness" | "/ping":
                return _health(self._is_alive)
            case "/readiness":
                return _health(self._is_alive and self._link.serving and self._link.fleet_serves)
        return None

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:  # noqa: ARG002
        self._num_open += 1
        try:
            answer = await self._logged_answer(request)
            if not isinstance(answer, web.Response):
                return answer
            if request.get(_HAS_BEGUN):  # an error within a stream: a second head would look like a part of the stream
                raise ConnectionResetError("an answer that had begun cannot go on")
            return await answer_whole(request, answer)
        except ConnectionError:
            if request.transport is not None:
                request.transport.abort()  # to close it would wait for a client that does not read
            raise
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_idle.set()

    async def _logged_answer(self, request: web.Request) -> web.StreamResponse:
        api = find_api(request.rel_url.raw_path)
        request_id = request[_NAME] = _request_id(request, api)
        if (probe := self._probe(request) or self._origins.preflight(request)) is not None:
            return probe
        began, route = time.monotonic(), f"{request.method} {request.rel_url.raw_path}"[:MAX_SHOWN]
        # All requests of a connection share a task, so every request sets its context variables anew.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(route=route, **({"client_request_id": request_id} if request_id else {}))
        caller.set(None)
        request_size.set(request.content_length or 0)
        line = begin_line(lambda name: 200 if request.get(_HAS_BEGUN) else http_status(name))
        status, name, reason = CLIENT_GONE, "", ""
        try:
            try:
                answer = await self._answer(request)
            except RequestError as error:
                name = error.code.name
                raise refused_by(error) from None
            status = answer.status
            return answer
        except HttpError as error:
            status, reason = error.status, str(error)
            return error.response(api.error_body(error, request_id))
        except (ConnectionError, asyncio.CancelledError):  # the client has disconnected, or does not read
            raise
        except Exception:
            log.exception("a call over HTTP failed")
            status = 500
            internal = HttpError(500, "internal_error", "internal error; the server's log has the details")
            return internal.response(api.error_body(internal, request_id))
        finally:
            if 400 <= status < 500:
                self._link.refusals.count(caller.get(), time.monotonic())
            shown: dict[str, Any] = {"status": name or grpc_name(status), "http_status": status}
            shown |= {"reason": reason} if reason else {}
            seconds = round(time.monotonic() - began, 6)
            peer = request.remote or ""
            self._lines.write(line, has_key=status != 401, **shown, peer=peer, total_seconds=seconds)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. Raises HttpError or RequestError if no part of the answer was sent."""
        page = self._page
        if page is not None and (shown := page.show(request)) is not None:
            return shown
        if (keyring := self._link.keyring) is not None:
            values = request.headers.getall("Authorization", [])
            if not values:  # Anthropic's clients send the key in another header
                values = [f"Bearer {key}" for key in request.headers.getall("X-Api-Key", [])]
            caller.set(key := keyring.authenticate([("authorization", value) for value in values]))
            self._link.refusals.check(key, time.monotonic())
        path = request.rel_url.raw_path
        found = page.find_route(request.method, path) if page is not None else None
        if (route := found or find_route(request.method, path)) is None:
            raise HttpError(404, "not_found", f"{request.method} {path}"[:MAX_SHOWN] + " is not served here")
        if path not in RESUMABLE and request.headers.get(HEADER):
            raise invalid(f"{path[:MAX_SHOWN]} has no streams that {HEADER} could resume", HEADER)
        with Held(self._room, client_of(caller.get(), request.remote or "")) as held:
            seconds, name = self._limits.receive_seconds, request[_NAME]
            answer = await route(Call(request, self._service, _trace(request), held, seconds, self._texts, name))
            if not isinstance(answer, web.Response):
                return answer
            held.take(len(answer.body) if isinstance(answer.body, bytes) else 0)
            return await answer_whole(request, answer)


def _health(is_well: bool) -> web.Response:
    return web.Response(status=200) if is_well else web.Response(status=503, headers=RETRY_AFTER)


def _request_id(request: web.Request, api: Api) -> str:
    """The name of a request in the log and in its answer: X-Request-Id, or a new name if the API has names."""
    given = request.headers.get(REQUEST_ID, "")
    if _PRINTABLE.fullmatch(given):
        return given
    return f"req_{uuid.uuid4().hex}" if api.id_header else ""


async def _echo_id(request: web.Request, response: web.StreamResponse) -> None:
    request[_HAS_BEGUN] = True
    response.headers["Server"] = "pagewire"
    if request_id := request.get(_NAME):
        response.headers[REQUEST_ID] = request_id
        if id_header := find_api(request.rel_url.raw_path).id_header:
            response.headers[id_header] = request_id


def _trace(request: web.Request) -> Metadata:
    """The trace context of an HTTP request, as gRPC metadata."""
    given = ((name, request.headers.get(name, "")) for name in _TRACE)
    return [(name, value) for name, value in given if _PRINTABLE.fullmatch(value)]
