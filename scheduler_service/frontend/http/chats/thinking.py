"""Turns a model's thinking on or off, for APIs with a switch."""

from typing import Any

from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.model import ServedModel


def check_budget(field: str, model: ServedModel) -> None:
    """Refuse a limit of thinking for a model whose thinking cannot be limited. Raises HttpError."""
    if model.chat_syntax is None or model.chat_syntax.reasoning is None:
        raise invalid(f"{field}: the model's chat template has no known reasoning that could be limited", field)
    if not model.has_forms:
        raise invalid(f"{field}: thinking cannot be limited here, because workers run without --forms", field)


def thinking_fields(field: str, model: ServedModel, *, is_on: bool) -> dict[str, Any]:
    """The fields of a chat with or without thinking. Raises HttpError if the model's thinking cannot be turned off.

    A chat template may have a variable for thinking. Otherwise, a budget of no tokens turns thinking off.
    """
    if model.tokenizer is not None and model.tokenizer.template_names("enable_thinking"):
        return {"chat_template_kwargs": {"enable_thinking": is_on}}
    if is_on or not can_think(model):
        return {}
    check_budget(field, model)
    return {"thinking_token_budget": 0}


def can_think(model: ServedModel) -> bool:
    """Whether the model writes reasoning in a known form."""
    return model.chat_syntax is not None and (model.chat_syntax.reasoning is not None or model.chat_syntax.has_channels)
