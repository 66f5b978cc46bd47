"""A model's syntax is told by what its chat template contains, or by the model's own response template."""

import pytest
from chat_examples import EXAMPLES
from test_chat_parser import events_of, text_of

from scheduler_service.frontend.chat.events import CallStarted, Content, Reasoning
from scheduler_service.frontend.chat.find_syntax import find_syntax
from scheduler_service.frontend.chat.syntax import JsonObject, Marks, Section

TEMPLATES = {
    "hermes": "<tools>{{ tools }}</tools> <tool_call>{{ call | tojson }}</tool_call>",
    "qwen-xml": "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "minimax": "{% set begin = '<minimax:tool_call>' %}<invoke name=\"a\">",
    "llama-json": '<|start_header_id|>{{ role }}<|end_header_id|> {"name": name, "parameters": object}',
    "llama-python": "<|header_start|> [func_name1(params_name1=params_value1...)]",
    "mistral-list": "{{ '[TOOL_CALLS][' }}",
    "mistral-named": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>{{ name }}\n```json\n",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "kimi-k2": "<|tool_calls_section_begin|>",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "granite": "<|start_of_role|>assistant<|end_of_role|><|tool_call|>",
    "phi-4-mini": "<|tool_call|>{{ call }}<|/tool_call|>",
    "functools": "<|tool|>{{ tools }}<|/tool|> prefix calls with functools",
    "gemma-4": "<|tool_call>call:{{ name }}<tool_call|> <|channel>thought\n<channel|>",
    "olmo-3": "<functions></functions> <function_calls>",
    "cohere": "<|START_ACTION|>",
    "reasoning": "{{ content.split('</think>') }}",
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_families_are_told_by_the_chat_template(family: str) -> None:
    found = find_syntax(TEMPLATES[family], None)
    assert found is not None
    assert found.family == family


def test_every_family_has_an_example_and_a_template() -> None:
    assert {example.syntax.family for example in EXAMPLES} | {"reasoning"} == TEMPLATES.keys()


def test_thinking_is_found_beside_calls() -> None:
    assert find_syntax(TEMPLATES["hermes"] + "<think>{{ x }}</think>", None).reasoning == Marks("<think>", "</think>")
    assert find_syntax(TEMPLATES["mistral-named"] + "[/THINK]", None).reasoning == Marks("[THINK]", "[/THINK]")
    assert find_syntax("{{ messages }}", None) is None


THINKING = {"open": "<reason>", "close": "</reason>", "content": "text"}


def template(calls: dict[str, object] | None = None, **fields: object) -> dict[str, object]:
    found = {"start_anchor": "<|bot|>", "fields": {"thinking": THINKING, **fields}}
    if calls:
        found["fields"]["tool_calls"] = calls
    return found


def test_a_response_template_of_json_is_read() -> None:
    calls = {
        "open": "<act>",
        "close": "</act>",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{inputs}"}},
    }
    found = find_syntax("", template(calls, content={"close": "<|over|>", "content": "text"}))
    assert found.section == Section(("<act>",), "</act>", "[", ",", "]")
    assert found.call == JsonObject("tool", "inputs")
    events = events_of(found, ['<reason>a</reason>b<act>[{"tool": "ring_bell", "inputs": {}}]</act><|over|>'])
    assert (text_of(events, Reasoning), text_of(events, Content)) == ("a", "b")
    assert [event.name for event in events if isinstance(event, CallStarted)] == ["ring_bell"]


def test_a_response_template_of_patterns_names_a_family() -> None:
    qwen = {"open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close": "</tool_call>", "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>"}}  # fmt: skip
    found = find_syntax("", template(qwen))
    assert found.family == "qwen-xml"
    assert found.reasoning == Marks("<reason>", "</reason>")
    calls = {"open_pattern": r"<\|start\|><\|channel\|>commentary to=functions\.(?P<name>\w+)"}
    harmony = {"thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"}, "tool_calls": calls}
    assert find_syntax("", {"fields": harmony}).family == "harmony"
    odd = {"open_pattern": "[^<]*<[|]odd[|]>", "close": "<|x|>", "content": "json"}
    assert find_syntax(TEMPLATES["hermes"], template(odd)).family == "hermes"


@pytest.mark.parametrize(
    "odd", [{}, {"fields": 1}, {"fields": {"tool_calls": 1}}, {"fields": {"tool_calls": {"open": [1]}}}]
)
def test_odd_response_templates_are_passed_over(odd: dict[str, object]) -> None:
    assert find_syntax("{{ messages }}", odd) is None


def test_special_tokens_are_shown_only_for_marks() -> None:
    syntax = find_syntax(TEMPLATES["hermes"], None)
    assert syntax.needs_special_tokens(["<|im_end|>", "<tool_call>"])
    assert not syntax.needs_special_tokens(["<|im_end|>", "</s>", ""])
