"""Serves the page with a recording, for people on this machine, until a signal arrives."""

import gzip
import logging
import socket
from importlib.metadata import version
from pathlib import Path

from aiohttp import web

from scheduler_service.frontend.http.page.files import HEADERS, read_files
from scheduler_service.recording.chunks import Chunks
from scheduler_service.recording.frames import RecordedFrames

NUMBER_CHARACTERS = 18


def recording_page(file: Path, frames: RecordedFrames, chunks: Chunks) -> web.Application:
    """The page's files, /page/info and /page/recording, for one recording."""
    page = read_files()
    info = {
        "keys": False,
        "learn": False,
        "recording": {
            "name": file.name,
            "num_steps": frames.num_steps,
            "first_at": 0.0,
            "last_at": round(frames.last_at - frames.first_at, 4),
        },
        "version": version("pagewire"),
    }

    async def answer(request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if path == "/page/info":
            return web.json_response(info)
        if path == "/page/recording":
            return _chunk(request, chunks)
        if (found := page.get(path)) is not None:
            return found.response(request)
        return web.json_response({"error": {"message": f"GET {path[:120]} is not served here"}}, status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app


def _chunk(request: web.Request, chunks: Chunks) -> web.Response:
    given = request.query.get("from", "1")
    if not (given.isascii() and given.isdigit() and len(given) <= NUMBER_CHARACTERS):
        message = f"from is {given[:NUMBER_CHARACTERS]!r}; it must be the number of a step"
        return web.json_response({"error": {"message": message}}, status=400)
    try:
        data = chunks.read(int(given))
    except LookupError as error:
        return web.json_response({"error": {"message": str(error)}}, status=404)
    headers = HEADERS | {"Content-Type": "application/json"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=data, headers=headers | {"Content-Encoding": "gzip"})
    return web.Response(body=gzip.decompress(data), headers=headers)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError if the address cannot be used."""
    host = host.strip("[]")
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve_recording(app: web.Application, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # it would print a traceback for each invalid request
    web.run_app(app, sock=listening, print=None, access_log=None)
