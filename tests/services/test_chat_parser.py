"""A model's text gives the same reasoning, content and calls, however it is cut."""

import json
import time

import pytest
from chat_examples import EXAMPLES, TOOLS, Example
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_service.frontend.chat.events import CallArguments, CallEnded, CallStarted, Content, Event, Reasoning
from scheduler_service.frontend.chat.families import GEMMA, HERMES, LLAMA_PYTHON, QWEN_XML
from scheduler_service.frontend.chat.parser import ChatParser
from scheduler_service.frontend.chat.syntax import ChatSyntax

SYNTAXES = {example.syntax.family: example.syntax for example in EXAMPLES}


def events_of(syntax: ChatSyntax, pieces: list[str], prompt_end: str = "", tools=TOOLS) -> list[Event]:
    """With adjacent texts joined."""
    parser = ChatParser(syntax, prompt_end, tools)
    joined: list[Event] = []
    for event in [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]:
        last = joined[-1] if joined else None
        if isinstance(event, Reasoning | Content) and type(last) is type(event):
            joined[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            assert event.index == last.index
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def text_of(events: list[Event], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_each_family(number: int) -> None:
    expected: Example = EXAMPLES[number]
    whole = events_of(expected.syntax, [expected.text], expected.prompt_end)
    assert text_of(whole, Reasoning) == expected.reasoning
    assert text_of(whole, Content) == expected.content
    started = [event for event in whole if isinstance(event, CallStarted)]
    found = [
        (
            call.name,
            json.loads("".join(e.text for e in whole if isinstance(e, CallArguments) and e.index == call.index)),
        )
        for call in started
    ]
    assert found == expected.calls
    if expected.ids is not None:
        assert [call.id for call in started] == expected.ids
    assert sum(isinstance(event, CallEnded) for event in whole) == len(started)
    for size in range(1, 12):
        pieces = [expected.text[at : at + size] for at in range(0, len(expected.text), size)]
        assert events_of(expected.syntax, pieces, expected.prompt_end) == whole, size


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_a_cut_message_has_the_start_of_the_whole_message(number: int) -> None:
    """A text cut by length or a stop string never has more than the whole text, and is the same in one piece."""
    expected: Example = EXAMPLES[number]
    whole = events_of(expected.syntax, [expected.text], expected.prompt_end)
    calls = [event for event in whole if isinstance(event, CallStarted)]
    for end in range(0, len(expected.text), 2):
        text = expected.text[:end]
        cut = events_of(expected.syntax, [text], expected.prompt_end)
        if end % 8 == 0:
            assert cut == events_of(expected.syntax, list(text), expected.prompt_end)
        started = [event for event in cut if isinstance(event, CallStarted)]
        assert [call.name for call in started] == [call.name for call in calls][: len(started)]
        for call in started:
            full, part = (
                "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == call.index)
                for events in (whole, cut)
            )
            assert full.startswith(part), (text, full, part)


ODD = """{"name": "ring", "arguments": {"note": "a|"}}|tide_at|ring_bell|ring|(|port=|'|"|\\|{|}|[|]|,|:| |
|x|é|<|functions.|:0|analysis|commentary to=functions.ring |\\u00|"id": 1"""
PIECES = sorted({*(mark for syntax in SYNTAXES.values() for mark in syntax.marks), *ODD.split("|"), "<|"})


@st.composite
def odd_texts(draw: st.DrawFn) -> tuple[ChatSyntax, str, list[int]]:
    """Whole and broken parts of all families' syntax, in any order, and where to cut the text."""
    base = draw(st.sampled_from(EXAMPLES))
    syntax = draw(st.sampled_from([base.syntax, *SYNTAXES.values()]))
    start = draw(st.integers(0, len(base.text)))
    end = draw(st.integers(start, len(base.text)))
    own = [base.text[start:end], base.text[:end], *syntax.marks]
    text = "".join(draw(st.lists(st.sampled_from([*own, *own, *PIECES]), max_size=12)))
    return syntax, text, sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))


@settings(max_examples=60, deadline=None)
@given(odd_texts(), st.booleans())
@example((HERMES, "<tool_call>" * 3 + '{"name": "ring"', [1, 5]), True)
def test_events_do_not_depend_on_the_cuts(case: tuple[ChatSyntax, str, list[int]], has_tools: bool) -> None:
    syntax, text, cuts = case
    tools = TOOLS if has_tools else []
    whole = events_of(syntax, [text], tools=tools)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert events_of(syntax, pieces, tools=tools) == whole
    assert events_of(syntax, list(text), tools=tools) == whole
    num_started = [event.index for event in whole if isinstance(event, CallStarted)]
    assert num_started == list(range(len(num_started)))
    assert [event.index for event in whole if isinstance(event, CallEnded)] == num_started
    if not has_tools:
        assert not num_started
        if not (syntax.reasoning or syntax.drops):
            assert text_of(whole, Content) == text  # no text is lost


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="ab <{[\n|", max_size=60), st.sampled_from(sorted(SYNTAXES)))
def test_plain_text_is_content_as_it_is(text: str, family: str) -> None:
    events = events_of(SYNTAXES[family], list(text))
    assert text_of(events, Content) == text
    assert all(isinstance(event, Content) for event in events)


def test_text_waits_only_while_a_mark_is_possible() -> None:
    for family, syntax in SYNTAXES.items():
        parser = ChatParser(syntax, "", TOOLS)
        parser.feed("Well")
        assert parser.feed(", no") == [Content(", no")], family
        assert parser.feed(" a < b") == [Content(" a < b")], family
        assert parser.feed(". The end") == [Content(". The end")], family


def test_arguments_come_as_the_model_writes_them() -> None:
    parser = ChatParser(HERMES, "", TOOLS)
    assert parser.feed('<tool_call>\n{"name": "tide_at", "arguments": ') == []
    assert parser.feed('{"po') == [CallStarted(0, "tide_at"), CallArguments(0, '{"po')]
    assert parser.feed('rt": "a}') == [CallArguments(0, 'rt": "a}')]
    assert parser.feed('"}}') == [CallArguments(0, '"}'), CallEnded(0)]
    assert parser.feed("\n</tool_call>") == []
    assert parser.finish() == []
    parser = ChatParser(QWEN_XML, "", TOOLS)
    assert parser.feed("<tool_call>\n<function=tide_at>\n<parameter=port>\nab") == [
        CallStarted(0, "tide_at"),
        CallArguments(0, '{"port": "ab'),
    ]
    assert parser.feed("c</par") == [CallArguments(0, "c")]
    assert parser.feed("a\nd") == [CallArguments(0, "</para\\nd")]
    assert parser.finish() == [CallEnded(0)]


def test_a_call_of_another_tool_and_calls_without_tools_are_content() -> None:
    text = '<tool_call>\n{"name": "tide_at", "arguments": {}}\n</tool_call>'
    assert events_of(HERMES, [text], tools=[]) == [Content(text)]
    assert events_of(HERMES, [text], tools=TOOLS[1:]) == [Content(text)]
    gemma = "<|channel>thought\na<channel|><|tool_call>call:ring_bell{}<tool_call|>"
    assert events_of(GEMMA, [gemma], tools=[]) == [
        Reasoning("a"),
        Content("<|tool_call>call:ring_bell{}<tool_call|>"),
    ]


def test_text_behind_a_broken_call_is_content() -> None:
    assert events_of(LLAMA_PYTHON, ["[tide_at(port='a', 3)] x"]) == [
        CallStarted(0, "tide_at"),
        CallArguments(0, '{"port": "a"'),
        CallEnded(0),
        Content(", 3)] x"),
    ]


def test_special_tokens_outside_of_calls_are_dropped() -> None:
    parser = ChatParser(HERMES, "", TOOLS, ["<|im_end|>", "<tool_call>", "</s>"])
    assert parser.feed("a<|im_") == [Content("a")]
    assert parser.feed("end|>b</s>") == [Content("b")]


def test_time_is_linear_in_the_text() -> None:
    """Texts that make a careless parser search again from each mark."""
    for syntax in SYNTAXES.values():
        opening = syntax.section.opens[0] if syntax.section else "<|start|>"
        for piece in (opening, "<", f"{opening}\n{' ' * 60}", '[tide_at(port="', '{"name": "ring_bell", '):
            text = piece * (2_000 // len(piece))
            began = time.process_time()
            events_of(syntax, [text[at : at + 9] for at in range(0, len(text), 9)])
            assert time.process_time() - began < 0.3, (syntax.family, piece)
