"""Tools for a model whose chat template knows none: tools, calls and results are written into the messages' texts.

The model is asked for calls in the form that Hermes made known, `<tool_call>` and JSON, which the parser then expects.
"""

import json
from typing import Any

from pagewire.v1 import inference_service_pb2 as pb

_INTRODUCTION = """\
You can call functions. The functions, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments, in this form:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""
_RESULT_BEGIN, _RESULT_END = "<tool_response>\n", "\n</tool_response>"


def write_out_tools(chat: pb.Chat) -> None:
    """Move the chat's tools into its system message, and each message's calls and results into its content."""
    tools = json.loads(chat.tools) if chat.tools else []
    chat.tools = ""
    messages: list[pb.ChatMessage] = []
    for message in chat.messages:
        fields = json.loads(message.fields) if message.fields else {}
        written = pb.ChatMessage(role=message.role, content=message.content, parts=message.parts)
        if calls := fields.get("tool_calls"):
            _append(written, "\n".join(map(_call, calls)), "\n" if message.content else "")
        if message.role == "tool":
            written = _result(written)
            joins = messages and messages[-1].role == "user" and messages[-1].content.endswith(_RESULT_END)
            if joins and not written.parts:
                messages[-1].content += f"\n{written.content}"
                continue
        messages.append(written)
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool.get("function", tool)) for tool in tools))
        if messages and messages[0].role == "system":
            _append(messages[0], text, "\n\n")
        else:
            messages.insert(0, pb.ChatMessage(role="system", content=text))
    del chat.messages[:]
    chat.messages.extend(messages)


def _call(call: dict[str, Any]) -> str:
    """A call as the model writes it. The text of arguments stays as it is: a call that was cut is no JSON."""
    function = call.get("function", call)
    arguments = function.get("arguments") or "{}"
    text = arguments.strip() or "{}" if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {text}}}\n</tool_call>'


def _result(message: pb.ChatMessage) -> pb.ChatMessage:
    """The result of a tool, as a message of the user."""
    if not message.parts:
        return pb.ChatMessage(role="user", content=_RESULT_BEGIN + message.content + _RESULT_END)
    begin, end = pb.ContentPart(text=_RESULT_BEGIN), pb.ContentPart(text=_RESULT_END)
    return pb.ChatMessage(role="user", parts=[begin, *message.parts, end])


def _append(message: pb.ChatMessage, text: str, between: str) -> None:
    """Add a text to the content of a message, behind `between`."""
    if message.parts:
        message.parts.add(text=between + text)
    else:
        message.content += between + text
