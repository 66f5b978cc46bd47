"""Finds the syntax of a model: from its own response template, or from the table of families by its chat template."""

from collections.abc import Mapping
from typing import Any

from scheduler_service.frontend.chat.families import family_of
from scheduler_service.frontend.chat.response_template import read_response_template
from scheduler_service.frontend.chat.syntax import ChatSyntax


def find_syntax(chat_template: str, response_template: Mapping[str, Any] | None) -> ChatSyntax | None:
    """The syntax of a model's messages; None if the model writes neither reasoning nor calls in a known form."""
    found = read_response_template(response_template) if response_template else None
    return found or family_of(chat_template)
