"""Stored responses: the JSON of a response, and the items that a later response continues from."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.http.limits import Held
from scheduler_service.frontend.http.service import Service
from scheduler_service.frontend.link.stored_texts import MAX_STORED_BYTES


@dataclass(frozen=True, slots=True)
class Stored:
    """`response`: the JSON of the response. `items`: the JSON of the list of all items before its output."""

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)

    def input(self) -> list[dict[str, Any]]:
        return list(from_json(self.items))

    def output(self) -> list[dict[str, Any]]:
        return list(from_json(self.response)["output"])


async def load(service: Service, response_id: str) -> Stored | None:
    """A stored response of the caller's tenant; None if there is none. Raises RequestError."""
    if (found := await service.link.stored.read(response_id)) is None:
        return None
    response, _, items = found.partition(b"\n")  # JSON of this server has no line breaks
    return Stored(response, items)


async def store(service: Service, response_id: str, stored: Stored) -> bool:
    """Store a response. Returns whether it was small enough. Raises RequestError."""
    data = b"%b\n%b" % (stored.response, stored.items)
    if len(data) > MAX_STORED_BYTES:
        return False
    await service.link.stored.store(response_id, data)
    return True


def items_to_store(items: list[dict[str, Any]]) -> bytes:
    """The JSON of items. Raises HttpError if the items are too large to be stored."""
    try:
        data = json.dumps(items, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # JSON has no such number, and pydantic reads 1e400 as infinity
        raise invalid("input has a number that no JSON can express", "input") from None
    if len(data) > MAX_STORED_BYTES // 2:
        limits = f"its input has {len(data)} bytes, and a response to store may have {MAX_STORED_BYTES // 2}"
        raise invalid(f"store is true; {limits}", "store")
    return data


async def previous_items(service: Service, response_id: str, held: Held) -> list[dict[str, Any]]:
    """The items of a stored response, with its output. Reserves memory. Raises HttpError and RequestError."""
    if (stored := await load(service, response_id)) is None:
        message = f"previous_response_id: {no_response(response_id)}; responses are stored with store: true"
        raise HttpError(400, "previous_response_not_found", message, "previous_response_id")
    held.take(stored.num_bytes)
    return stored.input() + stored.output()


def no_response(response_id: str) -> str:
    return f"there is no stored response {response_id[:64]!r}"
