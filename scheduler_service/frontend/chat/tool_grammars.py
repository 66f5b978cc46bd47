"""Compiles the grammars of messages with tool calls, in processes with limits, and caches recently used grammars."""

import json
import pickle
from collections.abc import Sequence

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tool_grammar import Choice, ModelTokens
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.forms.forms import FormError, Forms, form_texts

MAX_TOOLS_BYTES = 256 << 10
"""Largest number of bytes of a request's tools in JSON. 128 tools with 0.8 KB each take 0.15 s to compile."""


class ToolGrammars:
    """The grammars of a model's messages."""

    def __init__(self, syntax: ChatSyntax, tokens: ModelTokens) -> None:
        module = "scheduler_service.frontend.chat.tool_grammar_process"
        self._forms = Forms(module, "compiles grammars of tool calls", pickle.dumps((syntax, tokens)))

    async def read(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        *,
        parallel: bool = True,
        thinking_open: bool = False,
        thinking_closed: bool = False,
        form: pb.SamplingParams | None = None,
        thinking_budget: int | None = None,
        closes_objects: bool = True,
    ) -> str:
        """The compiled grammar of a message: see `tool_grammar`. Raises FormError or RequestError.

        `form`: parameters with the output form of the answer.
        """
        arguments = [choice, parallel, thinking_open]
        options = {"thinking_budget": thinking_budget, "closes_objects": closes_objects}
        options["thinking_closed"] = thinking_closed
        content = None
        if form is not None and (kind := form.WhichOneof("constraint")) is not None:
            content = [kind, list(form_texts(kind, form)), kind == "json_schema" and closes_objects]
        values = [(tool.name, tool.parameters, tool.strict) for tool in tools]
        try:
            message = json.dumps([values, arguments, options, content], allow_nan=False).encode()
        except ValueError:
            raise FormError("a tool's schema has a number that JSON does not have") from None
        if len(message) > MAX_TOOLS_BYTES:
            raise FormError(f"the tools have {len(message)} bytes in JSON; at most {MAX_TOOLS_BYTES} are allowed")
        grammar, error = await self._forms.compiled(message)
        if error:
            raise FormError(error)
        return grammar
