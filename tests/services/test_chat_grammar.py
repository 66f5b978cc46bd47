"""What a grammar of calls allows parses into calls whose arguments are valid; text without a mark stays free."""

import json
import re
from functools import lru_cache
from random import Random
from typing import Any

import jsonschema
import pytest
from chat_examples import EXAMPLES, TOOLS, thinking
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from schema_walks import WEIGHTS
from test_chat_parser import SYNTAXES, events_of, text_of

from pagewire_common.forms import parser_limits
from scheduler_service.frontend.chat.events import CallArguments, CallEnded, CallStarted, Content, Reasoning
from scheduler_service.frontend.chat.families import GEMMA, HARMONY, HERMES, LLAMA_JSON, LLAMA_PYTHON, QWEN_XML
from scheduler_service.frontend.chat.parser import opens_reasoning
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tool_grammar import GrammarError, ModelTokens, tool_grammar
from scheduler_service.frontend.chat.tool_grammar_process import compile_tools
from scheduler_service.frontend.chat.tool_grammars import ToolGrammars
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.forms.form_compiler import compile_form
from scheduler_service.frontend.forms.forms import FormError
from scheduler_service.frontend.forms.schema_text import SchemaError

END = 256
_SPECIAL = re.compile(
    r"<｜[^｜]+｜>|<\|[^|<>]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z_]+\]|</?(?:tool_call|think)>"
)
STRICT = [
    Tool(
        "move",
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["rook", "pawn"]},
                "from": {"type": "string", "minLength": 1, "maxLength": 4},
                "steps": {"type": "integer", "minimum": 1, "maximum": 99},
                "check": {"type": "boolean"},
                "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
                "clock": {
                    "type": "object",
                    "properties": {"left": {"type": "number"}, "by": {"anyOf": [{"type": "null"}, {"type": "string"}]}},
                    "required": ["left"],
                },
            },
            "required": ["kind", "steps"],
        },
        strict=True,
    ),
    Tool("moves"),
]
TOOLS_BY_NAME = {tool.name: tool for tool in [*STRICT, *TOOLS]}


class _Tokenizer:
    """A tokenizer of bytes, an end token and special tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = END

    def __init__(self, special: tuple[str, ...]) -> None:
        self.texts = special
        self.special_token_ids = list(range(END, END + 1 + len(special)))
        names = [b"<end>", *(text.encode() for text in special)]
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"\xff" + name for name in names]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache
def tokenizer_of(special: tuple[str, ...]) -> LLTokenizer:
    return LLTokenizer(_Tokenizer(special), eos_token=END)


def special_of(syntax: ChatSyntax) -> tuple[str, ...]:
    return tuple(sorted({found for mark in syntax.marks for found in _SPECIAL.findall(mark)}))


def matcher_of(grammar: str, special: tuple[str, ...] = ()) -> LLMatcher:
    return compiled_matcher(LLMatcher.grammar_from_lark(any_to_lark(grammar)), special)


def compiled_matcher(grammar: str, special: tuple[str, ...] = ()) -> LLMatcher:
    matcher = LLMatcher(tokenizer_of(special), grammar, log_level=0, limits=parser_limits())
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def ids_of(text: str, special: tuple[str, ...]) -> list[int]:
    found: list[int] = []
    pattern = "|".join(map(re.escape, special))
    for piece in re.split(f"({pattern})", text) if special else [text]:
        found += [END + 1 + special.index(piece)] if piece in special else piece.encode()
    return found


def follow(matcher: LLMatcher, text: str, special: tuple[str, ...] = ()) -> str:
    """The start of the text that the grammar allows."""
    ids = ids_of(text, special)
    for number, token in enumerate(ids):
        if not matcher.consume_token(token):
            return text_of_ids(ids[:number], special)
    return text


def text_of_ids(ids: list[int], special: tuple[str, ...]) -> str:
    return b"".join(special[i - END - 1].encode() if i > END else bytes([i]) for i in ids).decode(errors="replace")


ODD = ("unknown", '"ring_bell"}', "True\n", '"type"', "tide_at(port='", '"\\u00e9', ', "id"', "[CALL_ID]", " to=",
       "height:null", "<|end|>rest", "<|eom_id|>", "</tool_call> {")  # fmt: skip
HINTS = ["</parameter>", "\n</parameter>", "</arg_value>", '<|"|>', '"', "'", "</think>", "}"]


def walk(matcher: LLMatcher, special: tuple[str, ...], seed: int, most: int = 250) -> tuple[str, bool]:
    """A random text that the grammar allows, and whether the text is complete."""
    random, ids = Random(seed), []
    while len(ids) < most and not matcher.is_stopped():
        hint = random.choice(HINTS).encode()
        if random.random() < 0.15 and (ahead := matcher.deep_copy()).try_consume_tokens(list(hint)) == len(hint):
            matcher.consume_tokens(list(hint))
            ids += hint
            del ahead
            continue
        mask = matcher.compute_bitmask()
        may = [token for token in range(END + 1 + len(special)) if mask[token // 8] >> token % 8 & 1 and token != END]
        if matcher.is_accepting() and (not may or random.random() < 0.2):
            break
        plain = [token for token in may if 32 <= token < 127 or token == 10 or token > END] or may
        token = random.choices(plain, [20.0 if token > END else WEIGHTS[token] for token in plain])[0]
        matcher.consume_token(token)
        ids.append(token)
    return text_of_ids(ids, special), bool(matcher.is_accepting())


def check_calls(syntax: ChatSyntax, text: str, tools: list[Tool], prompt_end: str = "") -> int:
    """All calls of a complete text have valid arguments. Returns the number of calls."""
    events = events_of(syntax, [text], prompt_end, tools)
    started = [event for event in events if isinstance(event, CallStarted)]
    for call in started:
        text_of_arguments = "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == call.index)
        jsonschema.validate(json.loads(text_of_arguments), dict(TOOLS_BY_NAME[call.name].parameters))
    assert sum(isinstance(event, CallEnded) for event in events) == len(started)
    return len(started)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_walks_are_calls_with_valid_arguments(family: str, is_special: bool) -> None:
    """A walk may spell a mark that is a special token with other tokens, if the mark is no part of a call."""
    syntax = SYNTAXES[family]
    special = special_of(syntax) if is_special else ()
    tokens = ModelTokens({text: END + 1 + number for number, text in enumerate(special)})
    for parallel, seeds in ((True, 1), (False, 1)):
        whole = matcher_of(tool_grammar(syntax, STRICT, "required", parallel, False, tokens=tokens), special)
        for seed in range(seeds):
            text, is_complete = walk(whole.deep_copy(), special, seed)
            if is_complete:
                num_calls = check_calls(syntax, text, STRICT)
                assert num_calls == 1 or (parallel and num_calls > 1), text
                content = text_of(events_of(syntax, [text], tools=STRICT), Content)
                assert not content.strip(), (content, text)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_are_allowed_under_auto(number: int) -> None:
    """A grammar also forbids unknown tools, odd escapes and optional parts of the syntax: `ODD`."""
    example = EXAMPLES[number]
    special = special_of(example.syntax)
    tokens = ModelTokens({text: END + 1 + number for number, text in enumerate(special)})
    is_open = opens_reasoning(example.syntax, example.prompt_end)
    matcher = matcher_of(tool_grammar(example.syntax, TOOLS, "auto", True, is_open, tokens=tokens), special)
    text = example.text.removesuffix("<|call|>").removesuffix("<|return|>").removesuffix("<|tool_response>")
    allowed = follow(matcher, text, special)
    if allowed != text:
        assert any(part in text for part in ODD), (allowed, text)
    else:
        assert matcher.is_accepting()


@pytest.mark.parametrize("family", sorted(SYNTAXES))
def test_text_without_a_mark_is_free_under_auto(family: str) -> None:
    syntax = SYNTAXES[family]
    special = special_of(syntax)
    tokens = ModelTokens({text: END + 1 + number for number, text in enumerate(special)})
    matcher = matcher_of(tool_grammar(syntax, STRICT, "auto", True, False, tokens=tokens), special)
    header = "<|channel|>final<|message|>" if syntax is HARMONY else ""
    for text in ("Plain & simple: <b> {x} [y](z)\n\n", '{"kind": 1}', "[1, 2]", "é" * 9, "< tool_call"):
        found = matcher.deep_copy()
        assert follow(found, header + text, special) == header + text
        assert found.is_accepting()
        mask = found.compute_bitmask()
        assert all(mask[byte // 8] >> byte % 8 & 1 for byte in b"aZ<{[ \n9"), family


def test_a_call_that_begins_is_held_to_its_tool() -> None:
    whole = matcher_of(tool_grammar(HERMES, STRICT, "auto", True, False))
    begun = 'a <b> <tool_call>\n{"name": "move", "arguments": {"kind": "rook", "steps": 10'
    assert follow(whole.deep_copy(), f"{begun}0") == begun
    assert follow(whole.deep_copy(), 'x<tool_call>{"name": "nothing"') == 'x<tool_call>{"name": "'
    done = 'x<tool_call>{"name": "moves", "arguments": {}}\n</tool_call>'
    for parallel in (True, False):
        matcher = matcher_of(tool_grammar(HERMES, STRICT, "auto", parallel, False))
        assert follow(matcher, done) == done
        assert matcher.is_accepting()
        assert (follow(matcher, "\n<tool_call>") == "\n<tool_call>") == parallel


def compiled(
    syntax: ChatSyntax, tools: list[Tool], choice: str, is_open: bool, form: tuple[str, list[str]], special: Any = ()
) -> str:
    """The grammar of a message whose answer has a form."""
    tokens = ModelTokens({text: number for number, text in enumerate(special, END + 1)})
    values = [[tool.name, tool.parameters, tool.strict] for tool in tools]
    message = json.dumps([values, [choice, True, is_open], {}, [*form, True]]).encode()
    grammar, error = compile_tools(syntax, tokens, message)
    assert not error
    return grammar


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (("regex", ["[a-c]{2}"]), "ab", "ad"),
        (("choice", ["yes", "no"]), "no", "na"),
        (("grammar", ['start: "a" b\nb: /[0-9]/\n%ignore / /']), "a 1", "ab"),
        (("grammar", ['root ::= "x" | "yz"']), "yz", "yy"),
        (("json_schema", [f'{{"const": {2**70}}}']), str(2**70), "11x"),
    ],
)
def test_every_form_begins_after_thinking(form: tuple[str, list[str]], right: str, wrong: str) -> None:
    special = special_of(HARMONY)
    harmony = compiled(HARMONY, [], "none", False, form, special)
    analysis = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>"
    for grammar, marks, thought in (
        (compiled(thinking(HERMES), [], "none", True, form), (), "So {<a>}</think>\n\n"),
        (compiled(thinking(HERMES), [], "none", False, form), (), "<think>b</think>"),
        (harmony, special, analysis),
    ):
        matcher = compiled_matcher(grammar, marks)
        assert follow(matcher.deep_copy(), thought + right, marks) == thought + right
        assert follow(matcher, thought + wrong, marks) == thought + wrong[:-1]


def test_calls_and_forms_begin_after_thinking() -> None:
    syntax = thinking(HERMES)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    asked = ("json_schema", [json.dumps(schema)])
    form = compiled(syntax, [], "none", True, asked)
    thought = "Is <tool_call> {right}?\n"
    for text in (f'{thought}</think>\n\n{{"x": 1}}', f'{thought}</think>{{"x":2}}'):
        matcher = compiled_matcher(form)
        assert follow(matcher, text) == text
        assert matcher.is_accepting()
    assert follow(compiled_matcher(form), f"{thought}</think>no") == f"{thought}</think>"
    for is_open in (True, False):
        start = "" if is_open else "<think>"
        both = compiled(syntax, STRICT, "auto", is_open, asked)
        for text in (
            f'{start}a</think>{{"x": 1}}',
            f'{start}a</think>\n<tool_call>{{"name": "moves", "arguments": {{}}}}</tool_call>',
        ):
            matcher = compiled_matcher(both)
            assert follow(matcher, text) == text
            assert matcher.is_accepting()
        required = tool_grammar(syntax, STRICT, "required", True, is_open)
        assert follow(matcher_of(required), f"{start}a</think>\nb") == f"{start}a</think>\n"
    at_once = tool_grammar(syntax, STRICT, "required", True, False, thinking_closed=True)
    assert follow(matcher_of(at_once), "<think>") == "<t"
    assert follow(matcher_of(at_once), '<tool_call>{"name": "moves"') == '<tool_call>{"name": "moves"'
    unopened = tool_grammar(syntax, STRICT, "auto", True, False)
    for text in ("<thin b", "<think>a<tool_call></think>b", "b<think>"):
        matcher = matcher_of(unopened)
        assert follow(matcher, text) == text
        assert matcher.is_accepting()
    assert follow(matcher_of(unopened), "<think>a</think>b<tool_call>x") == "<think>a</think>b<tool_call>"


def test_the_closing_mark_is_forced_when_the_budget_is_spent() -> None:
    syntax, special = thinking(HERMES), ("</think>",)
    tokens = ModelTokens({"</think>": END + 1}, close=END + 1, ends=[END])
    matcher = matcher_of(tool_grammar(syntax, STRICT, "auto", True, True, tokens=tokens, thinking_budget=5), special)
    assert follow(matcher.deep_copy(), "ab</think>c", special) == "ab</think>c"
    assert follow(matcher.deep_copy(), "abcdefg", special) == "abcde"
    assert follow(matcher, "abcde</think>x<tool_call>y", special) == "abcde</think>x<tool_call>"
    none = tool_grammar(syntax, STRICT, "auto", True, True, tokens=tokens, thinking_budget=0)
    assert follow(matcher_of(none, special), "a", special) == ""
    unopened = tool_grammar(syntax, STRICT, "auto", True, False, tokens=tokens, thinking_budget=3)
    assert follow(matcher_of(unopened, special), "<think>abcd", special) == "<think>abc"
    assert follow(matcher_of(unopened, special), "<think>abc</think>d<tool_call>e", special).endswith("d<tool_call>")
    assert follow(matcher_of(unopened, special), "plain <think", special) == "plain <think"
    with pytest.raises(GrammarError, match="several tokens"):
        tool_grammar(syntax, STRICT, "auto", True, True, thinking_budget=5)


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(GrammarError, match="no tools"):
        tool_grammar(HERMES, [], "required", True, False)
    with pytest.raises(GrammarError, match="no known form"):
        tool_grammar(ChatSyntax("plain"), STRICT, "auto", True, False)
    bad = tool_grammar(HERMES, [Tool("a", {"type": "object", "properties": {"a": {"if": {}}}})], "auto", True, False)
    assert "if" in compile_form("grammar", [bad])[1]
    with pytest.raises(SchemaError, match="double"):
        tool_grammar(HERMES, [Tool("a", {"properties": {"a": {"const": 2**70}}})], "auto", True, False)
    loop = {"properties": {"a": {"$ref": "#"}}}
    for syntax in (LLAMA_PYTHON, GEMMA):
        with pytest.raises(SchemaError, match="deep"):
            tool_grammar(syntax, [Tool("a", loop)], "auto", True, False)


def test_grammars_pass_through_the_compiler_of_forms() -> None:
    """The compiler has a tokenizer of bytes, and knows none of the model's special tokens."""
    for syntax in SYNTAXES.values():
        tokens = ModelTokens({text: 150_000 + number for number, text in enumerate(special_of(syntax))})
        grammar = tool_grammar(syntax, STRICT, "auto", True, False, tokens=tokens)
        compiled, error = compile_form("grammar", [grammar])
        assert compiled
        assert not error, (syntax.family, error)


def test_reasoning_is_free_in_every_family() -> None:
    for syntax in (QWEN_XML, LLAMA_JSON):
        text = "<think>any {text}</think>ok"
        matcher = matcher_of(tool_grammar(thinking(syntax), STRICT, "auto", True, False))
        assert follow(matcher, text) == text
        assert text_of(events_of(thinking(syntax), [text], tools=STRICT), Reasoning) == "any {text}"


async def test_tools_are_compiled_in_a_process() -> None:
    special = special_of(HERMES)
    tokens = ModelTokens({text: END + 1 + number for number, text in enumerate(special)})
    grammars = ToolGrammars(HERMES, tokens)
    grammar = await grammars.read(STRICT, "required", parallel=False)
    matcher = LLMatcher(tokenizer_of(special), grammar, log_level=0, limits=parser_limits())
    text = '<tool_call>\n{"name": "moves", "arguments": {}}\n</tool_call>'
    assert follow(matcher, text, special) == text
    assert matcher.is_accepting()
    assert await grammars.read(STRICT, "required", parallel=False) is grammar
    for parameters, reason in (
        ({"type": "object", "properties": 3}, "parameters of 'a'"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
            "parameters of 'a'",
        ),
        ({"type": "object", "properties": {"a": {"minimum": float("inf")}}}, "number"),
        ({"description": "x" * (300 << 10)}, "bytes"),
    ):
        with pytest.raises(FormError, match=reason):
            await grammars.read([Tool("a", parameters)], "auto")
