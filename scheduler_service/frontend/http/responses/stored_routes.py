"""GET and DELETE of a stored response, and the list of its input items."""

import re
from typing import Any

from aiohttp import web

from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.http.responses.stored import Stored, load, no_response
from scheduler_service.frontend.link.engine_call import EngineCall

_JSON = "application/json"
_NUMBER = re.compile(r"[1-9][0-9]{0,2}")
MAX_LISTED = 100
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


async def show_response(call: Call) -> web.StreamResponse:
    _check_query(call, "include", "include[]")
    await _admit(call)
    return web.Response(body=(await _find(call)).response, content_type=_JSON, charset="utf-8")


async def delete_response(call: Call) -> web.StreamResponse:
    _check_query(call)
    await _admit(call)
    if not await call.service.link.stored.delete(_id(call)):
        raise _not_found(call)
    return web.json_response({"id": _id(call), "object": "response", "deleted": True})


async def list_input(call: Call) -> web.StreamResponse:
    """A page of the items before the response's output: those of earlier responses too. The newest item is first."""
    query = _check_query(call, "limit", "order", "after", "include", "include[]")
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not _NUMBER.fullmatch(limit) or int(limit) > MAX_LISTED:
        raise invalid(f"limit is {limit[:16]!r}; it must be 1 to {MAX_LISTED}", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"order is {order[:16]!r}; it must be asc or desc", "order")
    await _admit(call)
    given = (await _find(call)).input()
    base = f"{_id(call).removeprefix('resp_')}_in"  # unlike the ids of the output, which references may name
    items = [_shown(item, f"{base}{number:04x}") for number, item in enumerate(given)]
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        place = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise invalid(f"after is {after[:64]!r}, which is no item of this response", "after")
        items = items[place + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return web.json_response({"object": "list", "data": page, "has_more": len(page) < len(items)} | ends)


async def _admit(call: Call) -> None:
    """Count the call against the quota of its API key. Raises RequestError."""
    with EngineCall(call.service.link) as admitted:
        await admitted.admit_side_call()


def _id(call: Call) -> str:
    return call.request.path.split("/")[3]


async def _find(call: Call) -> Stored:
    if (found := await load(call.service, _id(call))) is None:
        raise _not_found(call)
    return found


def _not_found(call: Call) -> HttpError:
    return HttpError(404, "not_found", no_response(_id(call)), "response_id")


def _check_query(call: Call, *known: str) -> dict[str, str]:
    query = dict(call.request.query)
    if unknown := next((name for name in query if name not in known), None):
        raise invalid(f"{unknown[:64]} is not supported here", unknown[:64])
    return query


def _shown(item: dict[str, Any], number: str) -> dict[str, Any]:
    """An item with the fields that OpenAI's lists have. An item without an id is given one."""
    kind = item.get("type") or "message"
    shown: dict[str, Any] = {"id": f"{_PREFIXES.get(kind, 'item')}_{number}", "status": "completed"}
    shown |= {name: value for name, value in item.items() if value is not None} | {"type": kind}
    if kind == "message" and isinstance(item["content"], str):
        text = {"text": item["content"]}
        if item["role"] == "assistant":
            shown["content"] = [{"type": "output_text", "annotations": []} | text]
        else:
            shown["content"] = [{"type": "input_text"} | text]
    if kind == "reasoning":
        shown.setdefault("summary", [])
    return shown
