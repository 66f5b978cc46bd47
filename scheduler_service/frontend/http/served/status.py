"""Routes about the server itself."""

from importlib.metadata import version

from aiohttp import web

from scheduler_service.frontend.http.call import Call


async def show_version(_: Call) -> web.StreamResponse:
    return web.json_response({"version": version("pagewire")})


async def show_load(call: Call) -> web.StreamResponse:
    """The number of requests in flight in this front end, in vLLM's form."""
    return web.json_response({"server_load": len(call.service.link.requests.by_call)})
