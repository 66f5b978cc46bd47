# ruff: noqa: E501  # lines of examples
"""Examples of messages in the syntax of each model family, with the parts that a parser must find."""

from dataclasses import dataclass, field
from typing import Any

from scheduler_service.frontend.chat.families import (
    COHERE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTOOLS,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA_JSON,
    LLAMA_PYTHON,
    MINIMAX,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    OLMO,
    PHI,
    QWEN_XML,
    THINK,
)
from scheduler_service.frontend.chat.syntax import ChatSyntax, Marks
from scheduler_service.frontend.chat.tools import Tool

TOOLS = [
    Tool(
        "tide_at",
        {
            "type": "object",
            "properties": {
                "port": {"type": "string"},
                "hour": {"type": "integer"},
                "metric": {"type": "boolean"},
                "height": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"$ref": "#/$defs/where"},
            },
            "required": ["port"],
            "$defs": {"where": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
    ),
    Tool("ring_bell", {"type": "object", "properties": {}}),
    Tool("ring", {"type": "object", "properties": {"note": {}}}),
]


@dataclass(frozen=True)
class Example:
    syntax: ChatSyntax
    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[str | None] | None = None
    prompt_end: str = ""


def thinking(syntax: ChatSyntax, marks: Marks = THINK) -> ChatSyntax:
    from dataclasses import replace

    return replace(syntax, reasoning=marks)


_QUAY = ("tide_at", {"port": 'Quay "7"', "hour": 6})
_BELL = ("ring_bell", {})

EXAMPLES = [
    Example(
        thinking(HERMES),
        "<think>\nWhich port?\n</think>\n\nOne moment.\n<tool_call>\n"
        '{"name": "tide_at", "arguments": {"port": "Quay \\"7\\"", "hour": 6}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ring_bell", "arguments": {}}\n</tool_call>',
        "Which port?",
        "One moment.",
        [_QUAY, _BELL],
    ),
    Example(
        thinking(HERMES),
        "So be it.</think>\n\nYes <b>&</b> no.",
        "So be it.",
        "Yes <b>&</b> no.",
        prompt_end="<think>\n",
    ),
    Example(HERMES, 'No tags: </tool_call> {"name": 1} <tool_call', "", 'No tags: </tool_call> {"name": 1} <tool_call'),
    Example(HERMES, '<tool_call>{"name": "ring_bell"}</tool_call>', calls=[_BELL]),
    Example(
        HERMES,
        'Ask: <tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        content='Ask: <tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    ),
    Example(
        thinking(QWEN_XML),
        '<think>Hm</think><tool_call>\n<function=tide_at>\n<parameter=port>\nQuay "7"\n</parameter>\n'
        "<parameter=hour>\n6\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=ring_bell>\n</function>\n</tool_call>",
        "Hm",
        "",
        [_QUAY, _BELL],
    ),
    Example(
        QWEN_XML,
        "<tool_call>\n<function=tide_at>\n<parameter=port>\n\n a\n</b>\n\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n"
        '<parameter=height>\nnull\n</parameter>\n<parameter=tags>\n["x", "y"]\n</parameter>\n<parameter=where>\n'
        '{"lat": 1.5}\n</parameter>\n<parameter=odd>\n17\n</parameter>\n</function>\n</tool_call>',
        calls=[
            (
                "tide_at",
                {
                    "port": "\n a\n</b>\n",
                    "metric": True,
                    "height": None,
                    "tags": ["x", "y"],
                    "where": {"lat": 1.5},
                    "odd": 17,
                },
            )
        ],
    ),
    Example(
        thinking(GLM),
        '\n<think>Tides…</think>\nChecking.\n<tool_call>tide_at\n<arg_key>port</arg_key>\n<arg_value>Quay "7"</arg_value>\n'
        "<arg_key>hour</arg_key>\n<arg_value>6</arg_value>\n</tool_call>\n<tool_call>ring_bell\n</tool_call>",
        "Tides…",
        "Checking.",
        [_QUAY, _BELL],
    ),
    Example(
        GLM,
        "<tool_call>ring_bell</tool_call><tool_call>tide_at<arg_key>port</arg_key><arg_value>X</arg_value></tool_call>",
        calls=[_BELL, ("tide_at", {"port": "X"})],
    ),
    Example(
        thinking(MINIMAX),
        'Look it up.\n</think>\n\n<minimax:tool_call>\n<invoke name="tide_at">\n<parameter name="port">Quay "7"</parameter>\n'
        '<parameter name="hour">6</parameter>\n</invoke>\n<invoke name="ring_bell">\n</invoke>\n</minimax:tool_call>',
        "Look it up.",
        "",
        [_QUAY, _BELL],
        prompt_end="]~b]ai\n<think>\n",
    ),
    Example(LLAMA_JSON, '{"name": "tide_at", "parameters": {"port": "Quay \\"7\\"", "hour": 6}}', calls=[_QUAY]),
    Example(
        LLAMA_JSON,
        '<|python_tag|>{"type": "function", "name": "ring_bell", "parameters": {}}; '
        '{"name": "tide_at", "parameters": {"port": "A"}}<|eom_id|>',
        calls=[_BELL, ("tide_at", {"port": "A"})],
    ),
    Example(LLAMA_JSON, '{"port": "A"}', content='{"port": "A"}'),
    Example(
        LLAMA_PYTHON,
        "[tide_at(port='Quay \"7\"', hour=6), ring_bell()]",
        calls=[_QUAY, _BELL],
    ),
    Example(
        LLAMA_PYTHON,
        '<|python_start|>[tide_at(port="\\u00e9\\n\\x41\\q", metric=True, height=None, tags=["a", \'b\',], where={"lat": 1e3})]'
        "<|python_end|>",
        calls=[
            (
                "tide_at",
                {"port": "é\nA\\q", "metric": True, "height": None, "tags": ["a", "b"], "where": {"lat": 1000.0}},
            )
        ],
    ),
    Example(LLAMA_PYTHON, "[see the map](http://x) and [ring](y)", content="[see the map](http://x) and [ring](y)"),
    Example(
        OLMO,
        'Let me see.\n<function_calls>\ntide_at(port="Quay \\"7\\"", hour=6)\nring_bell()\n</function_calls>',
        content="Let me see.",
        calls=[_QUAY, _BELL],
    ),
    Example(
        thinking(MISTRAL_LIST, Marks("[THINK]", "[/THINK]")),
        '[THINK]Port?[/THINK][TOOL_CALLS] [{"name": "tide_at", "arguments": {"port": "Quay \\"7\\"", "hour": 6}, '
        '"id": "a1b2c3d4e"}, {"name": "ring_bell", "arguments": {}}]',
        "Port?",
        "",
        [_QUAY, _BELL],
    ),
    Example(
        MISTRAL_NAMED,
        'Sure.[TOOL_CALLS]tide_at[CALL_ID]a1b2c3d4e[ARGS]{"port": "Quay \\"7\\"", "hour": 6}[TOOL_CALLS]ring_bell[ARGS]{}',
        content="Sure.",
        calls=[_QUAY, _BELL],
        ids=["a1b2c3d4e", None],
    ),
    Example(
        thinking(DEEPSEEK_V3),
        "First,\nthis.</think>Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tide_at\n```json\n"
        '{"port": "Quay \\"7\\"", "hour": 6}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ring_bell\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "First,\nthis.",
        "Wait.",
        [_QUAY, _BELL],
        prompt_end="<｜Assistant｜><think>\n",
    ),
    Example(
        DEEPSEEK_V31,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tide_at<｜tool▁sep｜>{"port": "Quay \\"7\\"", "hour": 6}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>ring_bell<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=[_QUAY, _BELL],
    ),
    Example(
        KIMI,
        "On it.<|tool_calls_section_begin|><|tool_call_begin|>functions.tide_at:0<|tool_call_argument_begin|>"
        '{"port": "Quay \\"7\\"", "hour": 6}<|tool_call_end|><|tool_call_begin|>functions.ring_bell:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        content="On it.",
        calls=[_QUAY, _BELL],
        ids=["functions.tide_at:0", "functions.ring_bell:1"],
    ),
    Example(
        HARMONY,
        "<|channel|>analysis<|message|>Tide first.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.tide_at <|constrain|>json<|message|>"
        '{"port": "Quay \\"7\\"", "hour": 6}<|call|>',
        "Tide first.",
        "One moment.",
        [_QUAY],
        prompt_end="<|start|>user<|message|>Hi<|end|><|start|>assistant",
    ),
    Example(
        HARMONY,
        " to=functions.ring_bell<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>"
        "Done.<|return|>",
        content="Done.",
        calls=[_BELL],
    ),
    Example(
        HARMONY, "Short.<|end|>rest", "Short.", "rest", prompt_end="<|start|>assistant<|channel|>analysis<|message|>"
    ),
    Example(
        thinking(GRANITE),
        '<think>a</think><|tool_call|>[{"name": "tide_at", "arguments": {"port": "Quay \\"7\\"", "hour": 6}}, '
        '{"name": "ring_bell", "arguments": {}}]',
        "a",
        "",
        [_QUAY, _BELL],
    ),
    Example(
        PHI,
        '<|tool_call|>{"name": "tide_at", "arguments": {"port": "Quay \\"7\\"", "hour": 6}}<|/tool_call|>'
        '<|tool_call|>{"name": "ring_bell", "arguments": {}}<|/tool_call|>',
        calls=[_QUAY, _BELL],
    ),
    Example(
        FUNCTOOLS,
        'Use functools.cache? functools[{"name": "tide_at", "arguments": {"port": "Quay \\"7\\"", "hour": 6}}, '
        '{"name": "ring_bell", "arguments": {}}]',
        content="Use functools.cache?",
        calls=[_QUAY, _BELL],
    ),
    Example(
        GEMMA,
        '<|channel>thought\nA port.\n<channel|>Here:<|tool_call>call:tide_at{hour:6,port:<|"|>Quay "7"<|"|>}<tool_call|>'
        "<|tool_call>call:ring_bell{}<tool_call|><|tool_response>",
        "A port.",
        "Here:",
        [_QUAY, _BELL],
    ),
    Example(
        GEMMA,
        '<|tool_call>call:tide_at{height:null,metric:false,tags:[<|"|>a,b<|"|>,<|"|><|"|>],where:{lat:-0.5}}<tool_call|>',
        calls=[("tide_at", {"height": None, "metric": False, "tags": ["a,b", ""], "where": {"lat": -0.5}})],
        prompt_end="<|turn>model\n<|channel>thought\n<channel|>",
    ),
    Example(
        COHERE,
        "<|START_THINKING|>Plan.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "tide_at", "parameters": {"port": "Quay \\"7\\"", "hour": 6}},\n'
        '    {"tool_call_id": "1", "tool_name": "ring_bell", "parameters": {}}\n]<|END_ACTION|>',
        "Plan.",
        "",
        [_QUAY, _BELL],
        ["0", "1"],
    ),
    Example(COHERE, "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "", "Hello."),
]
