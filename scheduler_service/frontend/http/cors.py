"""Calls by pages of other origins in browsers (CORS, as in the Fetch standard)."""

import re
from collections.abc import Set

from aiohttp import web

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, Metadata"
"""Headers of answers that pages may read."""
MAX_AGE_SECONDS = 600
_HEADERS = re.compile(r"[A-Za-z0-9, -]{0,1024}")


class Origins:
    """The origins of which pages may call; "*" allows all. Calls carry an API key, never cookies."""

    def __init__(self, allowed: Set[str] = frozenset()) -> None:
        self._allowed = allowed

    def headers(self, request: web.Request) -> dict[str, str]:
        """The headers of an answer, an error included."""
        if not self._allowed:
            return {}
        if "*" in self._allowed:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": EXPOSED}
        found = {"Vary": "Origin"}  # caches must not give one origin's answer to another
        if (origin := request.headers.get("Origin", "")).lower() in self._allowed:
            found |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
        return found

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser's question whether a page may call; None for any other request."""
        asked = "Access-Control-Request-Method" in request.headers and "Origin" in request.headers
        if request.method != "OPTIONS" or not asked or not self._allowed:
            return None
        answer = web.Response(status=204)
        if "Access-Control-Allow-Origin" in self.headers(request):
            answer.headers["Access-Control-Allow-Methods"] = METHODS
            answer.headers["Access-Control-Max-Age"] = str(MAX_AGE_SECONDS)
            asked_headers = request.headers.get("Access-Control-Request-Headers", "")
            if _HEADERS.fullmatch(asked_headers):
                answer.headers["Access-Control-Allow-Headers"] = asked_headers
        return answer
