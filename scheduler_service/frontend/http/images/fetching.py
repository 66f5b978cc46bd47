"""Fetches images by http(s) from hosts that the operator allows with --allow-media-host.

Every address of a host must be public, and the connection goes to exactly the addresses that were checked, so a second
answer of the name server has no effect. The same rules hold for each redirect.
"""

import asyncio
import weakref
from collections.abc import Callable, Collection

from yarl import URL

from scheduler_service.frontend.http.images.addresses import Lookup, is_public, look_up
from scheduler_service.frontend.http.images.http_answer import Answer, AnswerError, answer_to

SECONDS = 10.0
"""Seconds for an image to arrive, with all redirects."""
MAX_REDIRECTS = 3
MAX_URL = 4096
"""Largest number of characters of a URL."""
MAX_AT_ONCE = 32
"""Images that a front end fetches at the same time; further ones wait, which counts as part of their time."""
MAX_OF_ONE = 8
"""Images fetched at the same time from one host, and for one client. Others must have places beside a slow host."""
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "Accept-Encoding": "identity"}


class FetchError(Exception):
    """Why an image cannot be fetched, as the end of a sentence."""


class BusyError(FetchError):
    """It had no turn in time."""


class Media:
    """`hosts`: allowed hosts, each with an optional port. Without a port, the usual port of the scheme is allowed."""

    def __init__(
        self,
        hosts: Collection[str] = (),
        *,
        lookup: Lookup = look_up,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self.hosts = frozenset(host.lower() for host in hosts)
        self._lookup, self._is_allowed = lookup, is_allowed
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._turns_of_one: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def fetch(self, url: str, take: Callable[[int], None], client: str = "") -> bytes:
        """The content at a URL. Raises FetchError.

        `take` gets the number of bytes of each piece, and may raise an error.
        """
        has_turn = False
        try:
            read = self._read(url)
            of_client, of_host = self._turn(f"client {client}"), self._turn(f"host {read.raw_host}")
            async with asyncio.timeout(SECONDS), of_client, of_host, self._turns:
                has_turn = True
                return await self._fetch(read, take)
        except TimeoutError:
            if not has_turn:
                raise BusyError("too many images are being fetched; try again later") from None
            raise FetchError(f"it did not arrive within {SECONDS:g} s") from None
        except AnswerError as error:
            raise FetchError(str(error)) from None
        except (OSError, ValueError) as error:
            raise FetchError(f"the connection failed ({type(error).__name__})") from None

    def _turn(self, name: str) -> asyncio.Semaphore:
        return self._turns_of_one.setdefault(name, asyncio.Semaphore(MAX_OF_ONE))

    async def _fetch(self, url: URL, take: Callable[[int], None]) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            async with answer_to(url, await self._addresses(url), _HEADERS) as answer:
                if answer.status not in _REDIRECTS:
                    return await _content(answer, take)
                url = self._read(answer.headers.get("location", ""), url)
        raise FetchError(f"it redirects more than {MAX_REDIRECTS} times")

    def _read(self, text: str, base: URL | None = None) -> URL:
        """Parse and check a URL, or the target of a redirect from `base`."""
        what = "it redirects to a URL that" if base is not None else "the URL"
        if len(text) > MAX_URL:
            raise FetchError(f"{what} has more than {MAX_URL} characters")
        try:
            url = URL(text) if base is None else base.join(URL(text))
            host, port = url.raw_host, url.port
        except ValueError:
            raise FetchError(f"{what} is invalid") from None
        if url.scheme not in _PORTS:
            raise FetchError(f"{what} has the scheme {url.scheme[:16]!r}; it must be http, https or data")
        if not host or port is None:
            raise FetchError(f"{what} names no host")
        if url.raw_user is not None or url.raw_password is not None:
            raise FetchError(f"{what} contains a user or a password")
        named = f"[{host}]" if ":" in host else host
        if f"{named}:{port}" not in self.hosts and (port != _PORTS[url.scheme] or named not in self.hosts):
            raise FetchError(f"{what} names the host {named[:253]}:{port}, which --allow-media-host does not allow")
        return url

    async def _addresses(self, url: URL) -> list[str]:
        """The addresses of a URL's host. Raises FetchError if there are none, or one of them is not public."""
        host = url.raw_host or ""
        looks_numeric = ":" in host or host.replace(".", "").isdigit()
        try:
            found = [host] if looks_numeric else await self._lookup(host)
        except (OSError, UnicodeError):
            found = []
        if not found:
            raise FetchError(f"the host {host[:253]} has no address")
        if not all(map(self._is_allowed, found)):
            raise FetchError(f"the host {host[:253]} has an address that is not public")
        return found


async def _content(answer: Answer, take: Callable[[int], None]) -> bytes:
    if answer.status != 200:
        raise FetchError(f"the host answers with status {answer.status}")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise FetchError("the host answers with a Content-Encoding that was not asked for")
    content = bytearray()
    async for piece in answer.content():
        take(len(piece))
        content += piece
    return bytes(content)
