"""The files of the page, read once at the start."""

from collections.abc import Mapping
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from aiohttp import web

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page runs its own scripts alone, and asks no other host."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks each time whether its copy is current
}
_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "json": "application/json",
    "mjs": "text/javascript",
    "png": "image/png",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_BINARY = frozenset(("png", "woff2"))


class PageFile(NamedTuple):
    body: bytes
    tag: str
    content_type: str

    def response(self, request: web.Request) -> web.Response:
        headers = HEADERS | {"ETag": self.tag, "Content-Type": self.content_type}
        if any(tag in (self.tag, "*") for tag in map(str.strip, request.headers.get("If-None-Match", "").split(","))):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.body, headers=headers)


def read_files() -> Mapping[str, PageFile]:
    """The files by path: / is index.html, and /static/NAME any file."""
    found = {f"/static/{name}": file for name, file in _read(files(__package__) / "static", "")}
    if (index := found.get("/static/index.html")) is not None:
        found["/"] = index
    return found


def _read(folder: Traversable, prefix: str) -> list[tuple[str, PageFile]]:
    found = []
    for one in folder.iterdir():
        if one.is_dir():
            found += _read(one, f"{prefix}{one.name}/")
        elif not one.name.startswith("."):
            body = one.read_bytes()
            suffix = one.name.rpartition(".")[2]
            kind = _TYPES.get(suffix, "text/plain") + ("" if suffix in _BINARY else "; charset=utf-8")
            found.append((prefix + one.name, PageFile(body, f'"{blake2b(body, digest_size=12).hexdigest()}"', kind)))
    return found
