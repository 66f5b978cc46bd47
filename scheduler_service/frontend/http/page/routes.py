"""The routes of the page at /. A browser loads the page without a key; what it shows needs a key that may administer.

Without API keys, operators' commands are for browsers on this machine alone, as AdminService is.
"""

import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from aiohttp import web
from pydantic import Field

from pagewire.v1 import admin_service_pb2 as pb
from scheduler_service.access.audit import note
from scheduler_service.frontend.http.body import Part
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import HttpError
from scheduler_service.frontend.http.page.files import read_files
from scheduler_service.frontend.http.writing import begin_events, end, write
from scheduler_service.frontend.link.engine_link import EngineLink

Route = Callable[[Call], Awaitable[web.StreamResponse]]
_ADAPTER = re.compile(r"/page/adapters/([^/]{1,256})")
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-Ip")


class WorkerPart(Part):
    worker: Annotated[str, Field(max_length=256)]


class KillPart(Part):
    small_pool: bool | None = None
    """The pool of the next worker; None for one like the last worker's."""


class Page:
    """The page of one front end, whose files are read here."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._files = read_files()

    def show(self, request: web.Request) -> web.Response | None:
        """The answer to a request that needs no key; None for any other request."""
        if request.method not in ("GET", "HEAD"):
            return None
        path = request.rel_url.raw_path
        if path == "/page/info":
            return web.json_response(
                {
                    "keys": self._link.keyring is not None,
                    "learn": self._link.welcome.done() and self._link.welcome.result().can_kill_worker,
                    "recording": None,
                    "version": version("pagewire"),
                }
            )
        file = self._files.get(path)
        return None if file is None else file.response(request)

    @staticmethod
    def find_route(method: str, path: str) -> Route | None:
        if _ADAPTER.fullmatch(path):
            return {"POST": load_adapter, "DELETE": unload_adapter}.get(method)
        return _ROUTES.get(f"{method} {path}")


async def show_feed(call: Call) -> web.StreamResponse:
    """Stream the engine's work, as server-sent events of JSON objects."""
    with call.service.link.feed.page(_authorization(call)) as page:
        await page.begin()
        response = await begin_events(call.request)
        while (events := await page.next()) is not None:
            await write(response, events)
        await end(response)
    return response


async def drain(call: Call) -> web.StreamResponse:
    worker = (await call.fields(WorkerPart)).worker
    note(worker=worker)
    await _administer(call, drain_worker=pb.DrainWorkerRequest(address=worker))
    return web.json_response({})


async def undrain(call: Call) -> web.StreamResponse:
    worker = (await call.fields(WorkerPart)).worker
    note(worker=worker)
    await _administer(call, undrain_worker=pb.UndrainWorkerRequest(address=worker))
    return web.json_response({})


async def flush(call: Call) -> web.StreamResponse:
    """Empty the prefix cache."""
    data = await _administer(call, reset_prefix_cache=pb.ResetPrefixCacheRequest())
    return web.json_response({"num_blocks": pb.ResetPrefixCacheResponse.FromString(data).num_blocks})


async def list_adapters(call: Call) -> web.StreamResponse:
    data = await _administer(call, list_adapters=pb.ListAdaptersRequest())
    found = pb.ListAdaptersResponse.FromString(data).adapters
    return web.json_response({"adapters": [_adapter(one) for one in found]})


async def load_adapter(call: Call) -> web.StreamResponse:
    name = _adapter_name(call)
    data = await _administer(call, load_adapter=pb.LoadAdapterRequest(name=name))
    return web.json_response(_adapter(pb.LoadAdapterResponse.FromString(data).adapter))


async def unload_adapter(call: Call) -> web.StreamResponse:
    await _administer(call, unload_adapter=pb.UnloadAdapterRequest(name=_adapter_name(call)))
    return web.json_response({})


async def kill_worker(call: Call) -> web.StreamResponse:
    """Kill the worker that `pagewire serve` started, which starts it again."""
    await _administer(call, kill_worker={"small_pool": (await call.fields(KillPart)).small_pool})
    return web.json_response({})


_ROUTES: dict[str, Route] = {
    "GET /page/feed": show_feed,
    "POST /page/drain": drain,
    "POST /page/undrain": undrain,
    "POST /page/flush": flush,
    "GET /page/adapters": list_adapters,
    "POST /page/learn/kill-worker": kill_worker,
}


def _adapter_name(call: Call) -> str:
    name = unquote(call.request.rel_url.raw_path.rpartition("/")[2])
    note(lora_name=name)
    return name


def _adapter(info: pb.AdapterInfo) -> dict[str, Any]:
    return {"name": info.name, "fingerprint": info.fingerprint, "num_bytes": info.num_bytes}


def _authorization(call: Call) -> str:
    key = call.request.headers.get("X-Api-Key", "")
    return call.request.headers.get("Authorization", f"Bearer {key}" if key else "")


async def _administer(call: Call, **command: Any) -> bytes:
    """Raises HttpError for a caller that may not command, and RequestError."""
    if call.service.link.keyring is None:
        _check_is_here(call.request)
    return await call.service.link.administer(_authorization(call), **command)


def _check_is_here(request: web.Request) -> None:
    """Raise HttpError unless a program of this machine, or this page in a browser on this machine, has sent a request.

    Pages of other sites could send it from a browser here. They have another Origin, or a Host that is a name which
    their owner lets point here.
    """
    host = urlsplit(f"//{request.host}").hostname or ""
    origin = request.headers.get("Origin")
    if not _is_loopback(request.remote or "") or any(name in request.headers for name in _FORWARDED):
        reason = "without API keys, commands are for this machine alone; set --api-keys or PAGEWIRE_API_KEY"
    elif host != "localhost" and not _is_loopback(host):
        reason = "without API keys, commands need an address of this machine, such as http://127.0.0.1"
    elif origin is not None and urlsplit(origin).netloc != request.host:
        reason = "a page of another origin may not command"
    else:
        return
    raise HttpError(403, "permission_denied", reason)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
