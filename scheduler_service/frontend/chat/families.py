"""The table of model families: how each writes reasoning and calls, and the texts in its chat template that tell it.

A family is told by what the chat template contains, never by the model's name. The first row that fits counts. Sources
are the families' published chat templates and model cards.
"""

# ruff: noqa: RUF001  # marks of DeepSeek contain such characters

from dataclasses import replace

from scheduler_service.frontend.chat.calls import channels
from scheduler_service.frontend.chat.syntax import (
    BracedCall,
    ChatSyntax,
    JsonObject,
    Marks,
    NamedJson,
    PythonCall,
    Section,
    Tagged,
)

THINK = Marks("<think>", "</think>")
_MISTRAL_THINK = Marks("[THINK]", "[/THINK]")
_NINE = "[a-zA-Z0-9]{9}"

HERMES = ChatSyntax("hermes", None, Section(("<tool_call>",), "</tool_call>", is_single=True), JsonObject())
QWEN_XML = ChatSyntax(
    "qwen-xml",
    None,
    Section(("<tool_call>",), "</tool_call>", is_single=True),
    Tagged("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", has_lines=True),
)
GLM = ChatSyntax(
    "glm",
    None,
    Section(("<tool_call>",), is_single=True),
    Tagged("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
)
MINIMAX = ChatSyntax(
    "minimax",
    None,
    Section(("<minimax:tool_call>",), "</minimax:tool_call>"),
    Tagged('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>"),
)
LLAMA_JSON = ChatSyntax(
    "llama-json",
    None,
    Section(("<|python_tag|>",), separator=";", starts="{"),
    JsonObject(arguments_key="parameters"),
    drops=("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>"),
)
LLAMA_PYTHON = ChatSyntax(
    "llama-python",
    None,
    Section(("<|python_start|>",), "<|python_end|>", "[", ",", "]", starts="["),
    PythonCall(),
    drops=("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>"),
)
MISTRAL_LIST = ChatSyntax(
    "mistral-list", None, Section(("[TOOL_CALLS]",), "", "[", ",", "]"), JsonObject(), call_id=_NINE
)
MISTRAL_NAMED = ChatSyntax(
    "mistral-named",
    None,
    Section(("[TOOL_CALLS]",), is_single=True),
    NamedJson(before_arguments="[ARGS]", id_mark="[CALL_ID]"),
    call_id=_NINE,
)
_DEEPSEEK_SECTION = Section(("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = ChatSyntax(
    "deepseek-v3",
    None,
    _DEEPSEEK_SECTION,
    NamedJson("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
    arguments_as_objects=False,
)
DEEPSEEK_V31 = ChatSyntax(
    "deepseek-v3.1",
    None,
    _DEEPSEEK_SECTION,
    NamedJson("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    arguments_as_objects=False,
)
KIMI = ChatSyntax(
    "kimi-k2",
    None,
    Section(("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>"),
    NamedJson(
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        prefix="functions.",
        is_numbered=True,
    ),
    call_id=r"functions\.[^:]+:[0-9]+",
)
HARMONY = ChatSyntax("harmony", drops=channels.MARKS, has_channels=True)
GRANITE = ChatSyntax("granite", None, Section(("<|tool_call|>", "<tool_call>"), "", "[", ",", "]"), JsonObject())
PHI = ChatSyntax("phi-4-mini", None, Section(("<|tool_call|>",), "<|/tool_call|>", is_single=True), JsonObject())
FUNCTOOLS = ChatSyntax("functools", None, Section(("functools[",), "", "", ",", "]"), JsonObject())
GEMMA = ChatSyntax(
    "gemma-4",
    Marks("<|channel>thought\n", "<channel|>"),
    Section(("<|tool_call>",), "<tool_call|>", is_single=True),
    BracedCall("call:", '<|"|>'),
    drops=("<turn|>", "<|tool_response>"),
)
OLMO = ChatSyntax("olmo-3", None, Section(("<function_calls>",), "</function_calls>"), PythonCall())
COHERE = ChatSyntax(
    "cohere",
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Section(("<|START_ACTION|>",), "<|END_ACTION|>", "[", ",", "]"),
    JsonObject("tool_name", "parameters", "tool_call_id", writes_id=True),
    drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"),
    call_id="[0-9]+",
)

_ROWS: tuple[tuple[tuple[str, ...], ChatSyntax], ...] = (
    (("<|channel|>", "<|message|>", "<|start|>"), HARMONY),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<minimax:tool_call>", "<invoke"), MINIMAX),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>", "<function=", "<parameter="), QWEN_XML),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<|START_ACTION|>",), COHERE),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<function_calls>", "<functions>"), OLMO),
    (("<|tool_call|>", "<|/tool_call|>"), PHI),
    (("functools", "<|tool|>"), FUNCTOOLS),
    (("<|tool_call|>", "<|start_of_role|>"), GRANITE),
    (("<tool_call>",), HERMES),
    (("<|start_header_id|>", "[func_name1("), LLAMA_PYTHON),
    (("<|header_start|>", "[func_name1("), LLAMA_PYTHON),
    (("<|start_header_id|>", '"parameters":'), LLAMA_JSON),
    (("<|header_start|>", '"parameters":'), LLAMA_JSON),
)
_REASONING = (THINK, _MISTRAL_THINK)


def family_of(text: str) -> ChatSyntax | None:
    """The syntax of the family whose marks a chat template contains; None if no family is known."""
    found = next((syntax for words, syntax in _ROWS if all(word in text for word in words)), None)
    reasoning = next((marks for marks in _REASONING if marks.close in text), None)
    if found is None:
        return ChatSyntax("reasoning", reasoning) if reasoning else None
    if found.has_channels or found.reasoning is not None or reasoning is None:
        return found
    drops = found.drops
    if found is GRANITE and "<response>" in text:
        drops = (*drops, "<response>", "</response>")
    return replace(found, reasoning=reasoning, drops=drops)
