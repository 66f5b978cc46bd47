"""The JSON object of a response: what was asked, and what has come of it."""

import json
import time
from typing import Any

from pagewire_common.model_files.generation_config import GenerationDefaults
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.responses.chat_body import read_tools
from scheduler_service.frontend.http.responses.fields import Format, ResponseFields
from scheduler_service.frontend.http.responses.output_items import OutputItems


class ResponseObject:
    """A response without its output, which follows `head` item by item. `name`: the model or adapter that was asked.
    `created`: Unix time in seconds.

    Raises HttpError if the request has a number that is infinite or none.
    """

    def __init__(
        self, response_id: str, created: int, name: str, fields: ResponseFields, defaults: GenerationDefaults
    ) -> None:
        self.id = response_id
        self.status = "in_progress"
        self.error: dict[str, Any] | None = None
        self.is_stored = fields.store
        try:
            self._asked = json.dumps(_asked(response_id, created, name, fields, defaults), allow_nan=False)
        except ValueError:  # JSON has no such number, and pydantic reads 1e400 as infinity
            raise invalid("a schema has a number that no JSON can express") from None

    def begun(self) -> str:
        """The response before its output, as JSON."""
        return f'{self.head(None)}"output": []}}'

    def head(self, usage: dict[str, Any] | None) -> str:
        """The members of the JSON object before the output."""
        found = {
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "store": self.is_stored,
        } | ({"usage": usage} if usage else {})
        return f"{self._asked[:-1]}, {json.dumps(found)[1:-1]}, "


def usage(
    items: OutputItems, num_prompt_tokens: int, num_cached_tokens: int, num_reasoning_tokens: int
) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": items.num_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_prompt_tokens + items.num_tokens,
    }


def _asked(
    response_id: str, created: int, name: str, fields: ResponseFields, defaults: GenerationDefaults
) -> dict[str, Any]:
    """The members that repeat the request."""
    reasoning, text = fields.reasoning, fields.text
    tools = read_tools(fields)
    names = {name: getattr(fields, name) for name in ("user", "safety_identifier", "prompt_cache_key")}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": name,
        "instructions": fields.instructions,
        "previous_response_id": fields.previous_response_id,
        "tools": [
            {"parameters": None, "strict": tool.strict is True} | tool.model_dump(exclude_none=True) for tool in tools
        ],
        "tool_choice": fields.tool_choice or "auto",
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "max_tool_calls": fields.max_tool_calls,
        "text": {"format": _format(text.format if text else None), "verbosity": "medium"},
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "max_output_tokens": fields.max_output_tokens,
        "temperature": defaults.http_temperature if fields.temperature is None else fields.temperature,
        "top_p": defaults.top_p if fields.top_p is None else fields.top_p,
        "top_logprobs": fields.top_logprobs or 0,
        "metadata": fields.metadata or {},
        "truncation": "disabled",
        "service_tier": "default",
        "background": False,
    } | {name: value for name, value in names.items() if value is not None}  # OpenAI's schema has no null for them


def _format(given: Format | None) -> dict[str, Any]:
    if given is None or given.type != "json_schema":
        return {"type": given.type if given else "text"}
    described = {} if given.description is None else {"description": given.description}
    shown = {"type": "json_schema", "name": given.name or "answer", **described}
    return shown | {"schema": given.schema_, "strict": given.strict is True}
