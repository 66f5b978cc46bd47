"""Items that a request names by their ids, instead of sending them: output of stored responses."""

import re
from typing import Any

from pydantic_core import to_json

from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.limits import Held
from scheduler_service.frontend.http.responses.stored import load
from scheduler_service.frontend.http.service import Service

MAX_RESPONSES = 64
"""Stored responses that the references of a request may name."""
_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})[0-9a-f]{4}")
"""The ids of this server's output items, which name their response."""


async def resolve_references(service: Service, items: list[dict[str, Any]], held: Held) -> list[dict[str, Any]]:
    """The items, with stored items in place of references. Unknown references stay. Raises HttpError, RequestError.

    The stored items together are no larger than a body, as if the client had sent the items themselves.
    """
    wanted: dict[str, set[str]] = {}  # ids of items by the response's id
    for item in items:
        if (item_id := _referred(item)) and (found := _ID.fullmatch(item_id)):
            of_response = wanted.setdefault(f"resp_{found[1]}", set())
            if item_id in of_response:
                raise invalid(f"input names the item {item_id!r} twice", "input")
            of_response.add(item_id)
    if len(wanted) > MAX_RESPONSES:
        raise invalid(f"input names items of {len(wanted)} responses; it may name those of {MAX_RESPONSES}", "input")
    known: dict[str, dict[str, Any]] = {}
    num_bytes, most_bytes = 0, service.link.request_limits().num_bytes
    for response_id, item_ids in wanted.items():
        if (stored := await load(service, response_id)) is not None:
            held.take(len(stored.response))
            for item in stored.output():
                if item["id"] in item_ids:
                    known[item["id"]] = item
                    num_bytes += len(to_json(item))
        if num_bytes > most_bytes:
            raise invalid(f"the items that input names have {num_bytes} bytes; they may have {most_bytes}", "input")
    return [known.get(_referred(item), item) for item in items]


def _referred(item: dict[str, Any]) -> str:
    """The id that a reference names; "" for other items."""
    item_id = item.get("id")
    is_reference = item.get("type") == "item_reference" or item.keys() == {"id"}
    return item_id if is_reference and isinstance(item_id, str) else ""
