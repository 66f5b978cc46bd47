"""Streams of server-sent events, as a client reads them that resumes broken streams."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_TEXTS = {"content", "reasoning", "reasoning_content", "arguments", "text", "partial_json", "thinking"}


@dataclass
class Event:
    """`data`: the JSON of the event, or its text. `retry`: milliseconds, as text; "" if the event says none."""

    id: str
    data: Any
    retry: str = ""


@dataclass
class Repeated:
    """A request that is sent again to resume its stream."""

    url: str
    route: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    async def events(self, last_id: str = "0") -> list[Event]:
        """The events after the event of this id. With "", the request has no Last-Event-ID."""
        async with aiohttp.ClientSession() as session, self._post(session, last_id) as answer:
            assert answer.status == 200, await answer.text()
            *blocks, rest = (await answer.text()).split("\n\n")
            assert rest == ""
            return list(map(_read, blocks))

    async def refusal(self, last_id: str) -> tuple[int, str]:
        """The status and the message of an error before the stream."""
        async with aiohttp.ClientSession() as session, self._post(session, last_id) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    def _post(self, session: aiohttp.ClientSession, last_id: str) -> Any:
        headers = self.headers | ({"Last-Event-ID": last_id} if last_id else {})
        return session.post(self.url + self.route, json=self.body, headers=headers)


def _read(block: str) -> Event:
    lines = [line for line in block.split("\n") if not line.startswith(":")]
    fields = dict(line.split(": ", 1) for line in lines)
    assert "id" not in fields or lines[-1].startswith("id: ")
    data = fields["data"]
    return Event(fields.get("id", ""), data if data == "[DONE]" else json.loads(data), fields.get("retry", ""))


def summed(events: Sequence[Event]) -> dict[str, Any]:
    """What a stream says, however its texts are divided into events: by place, joined texts and lists, and last values.

    The number of cached tokens is left out: it is the server's affair.
    """
    sums: dict[str, Any] = {}

    def add(place: str, name: str, value: Any) -> None:
        match value:
            case dict():
                place += f".{name}[{value.get('index', '')}]"
                for key, part in value.items():
                    add(place, key, part)
            case [{"index": _}, *_]:
                for part in value:
                    add(place, name, part)
            case list():
                sums[f"{place}.{name}"] = sums.get(f"{place}.{name}", []) + value
            case str() if name in _TEXTS:
                sums[f"{place}.{name}"] = sums.get(f"{place}.{name}", "") + value
            case _ if name != "cached_tokens":
                sums[f"{place}.{name}"] = value

    for event in events:
        add("", "event", event.data)
    return sums
