"""The grammar of a message with tool calls: text is free up to a mark of the family, and each call obeys its schema.

The grammar is a text for the field `sampling.grammar`. Writing the grammar rewrites clients' schemas, which may take
long: run `tool_grammar` where forms are compiled, within limits of time and memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scheduler_service.frontend.chat.calls import channels
from scheduler_service.frontend.chat.grammar.json_calls import channel_call, json_object_call, named_json_call
from scheduler_service.frontend.chat.grammar.lark import SPACE, Lark, escaped
from scheduler_service.frontend.chat.grammar.literal_calls import braced_call, python_call
from scheduler_service.frontend.chat.grammar.tagged_calls import tagged_call
from scheduler_service.frontend.chat.syntax import BracedCall, ChatSyntax, JsonObject, NamedJson, PythonCall, Tagged
from scheduler_service.frontend.chat.tools import Tool

Choice = Literal["auto", "required", "none"]
ANSWER = "answer"
"""The name of the grammar of an answer with an output form."""


class GrammarError(ValueError):
    """The request cannot be held by a grammar. The message says why."""


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The tokens of a model that a grammar names by their ids.

    `special`: ids of special tokens by their texts. `close`: the id of the token that closes reasoning; None if the
    mark has several tokens. `ends`: ids of end-of-sequence tokens.
    """

    special: Mapping[str, int] = field(default_factory=dict)
    close: int | None = None
    ends: Sequence[int] = ()


def tool_grammar(
    syntax: ChatSyntax,
    tools: Sequence[Tool],
    choice: Choice,
    parallel: bool,
    thinking_open: bool,
    *,
    has_form: bool = False,
    tokens: ModelTokens | None = None,
    thinking_budget: int | None = None,
    closes_objects: bool = True,
    thinking_closed: bool = False,
) -> str:
    """The grammar of a message, in Lark's syntax. Raises GrammarError or SchemaError.

    A named choice is "required" with the named tool alone. `parallel`: whether the message may have several calls.
    `thinking_open`: whether the prompt has opened reasoning. `thinking_closed`: whether it has closed reasoning; a
    required call, or an answer with a form, then begins at once. `has_form`: the answer, which begins after reasoning,
    obeys another grammar, which must be added under the name `ANSWER`. `thinking_budget`: the number of tokens of
    reasoning after which the closing mark is forced.
    `closes_objects`: whether arguments have only keys that a schema names, even if the tool is not strict.
    """
    if choice == "required" and not tools:
        raise GrammarError("a call is required, and there are no tools")
    if choice != "none" and tools and not syntax.has_calls:
        raise GrammarError("the model's chat template has no known form of calls")
    tokens = tokens or ModelTokens()
    writer = _Writer(
        syntax,
        () if choice == "none" else tuple(tools),
        choice == "required",
        parallel,
        has_form,
        tokens,
        thinking_budget,
        Lark(tokens.special, closes_objects=closes_objects),
        thinking_closed,
    )
    start = writer.channels(thinking_open) if syntax.has_channels else writer.message(thinking_open)
    return writer.lark.text(start)


@dataclass(frozen=True, slots=True)
class _Writer:
    syntax: ChatSyntax
    tools: Sequence[Tool]
    is_required: bool
    is_parallel: bool
    has_form: bool
    tokens: ModelTokens
    budget: int | None
    lark: Lark
    thinking_closed: bool

    def message(self, thinking_open: bool) -> str:
        reasoning, lark = self.syntax.reasoning, self.lark
        is_free = not self.is_required and not self.has_form
        if reasoning is None or (self.thinking_closed and not is_free):
            return self._body("")
        thought, after = self._reasoning(reasoning.close), self._body("")
        if not is_free:
            after = f"{lark.space()} {after}"
        if thinking_open:
            return f"{thought} {after}"
        opening = reasoning.open.strip()
        start = SPACE + escaped(opening)
        if lark.is_special(opening):
            before = lark.free_until([opening]) if is_free else f"{lark.space()} {lark.mark(opening)}"
            opened, start = f"{before} {thought}", ""
        elif self.budget is not None or lark.is_special(reasoning.close):
            opened = f"{lark.regex(start)} {thought}"
        else:
            opened = lark.rule(lark.regex(f"{start}(?s:.*){escaped(reasoning.close)}"), "[lazy]")
        return lark.any_of([lark.rule(f"{opened} {after}"), lark.rule(self._body(start))])

    def _reasoning(self, close: str) -> str:
        """Reasoning and the mark that closes it."""
        if self.budget is None:
            return self.lark.free_until([close])
        if self.tokens.close is None:
            raise GrammarError("reasoning has no limit for this model: the mark that closes it has several tokens")
        # A close mark that is no special token might also be spelled by other tokens; the model's own token counts.
        banned = ",".join(map(str, (self.tokens.close, *self.tokens.ends)))
        thought = f"<[^{banned}]>{{0,{self.budget}}} " if self.budget else ""
        return self.lark.rule(f"{thought}<[{self.tokens.close}]>")

    def _body(self, excluded: str) -> str:
        """The message after reasoning. `excluded`: free text does not begin with this regular expression."""
        if not self.tools:
            return self._answer(excluded)
        section = self.syntax.section
        if section is None:
            raise GrammarError("the model's chat template has no known form of calls")
        lark, opens = self.lark, section.opens
        behind = self._section()
        if self.is_required or self.has_form:
            calls = [lark.rule(lark.spaced(lark.mark(opens[0]), behind))]
            if section.starts:
                calls.append(self._unmarked())
            if self._repeats():
                calls[0] = lark.rule(f"{calls[0]} ({lark.space()} {calls[0]})*")
            return lark.any_of(calls if self.is_required else [*calls, self._answer("")])
        excluded = self._unmarked_start(excluded)
        parts = [self._free(excluded)]
        call = f"{lark.free_until(opens, excluded)} {lark.space()} {behind}"
        if self._repeats():
            call += f" ({lark.free_until(opens)} {lark.space()} {behind})* {self._free('')}"
        parts.append(call)
        if section.starts:
            parts.append(self._unmarked())
        return lark.any_of(map(lark.rule, parts))

    def _unmarked_start(self, excluded: str) -> str:
        section = self.syntax.section
        if section is None or not section.starts:
            return excluded
        if isinstance(self.syntax.call, JsonObject):
            starts = f'[ \\n]*\\{{[ \\n]*"{escaped(self.syntax.call.name_key)}"'
        else:
            starts = f"[ \\n]*\\[({'|'.join(escaped(tool.name) for tool in self.tools)})\\("
        return f"({excluded}|{starts})" if excluded else starts

    def _repeats(self) -> bool:
        """Whether several sections may follow each other."""
        section = self.syntax.section
        return self.is_parallel and section is not None and section.is_single

    def _section(self) -> str:
        """A section behind its opening mark."""
        section, lark = self.syntax.section, self.lark
        if section is None:
            return ""
        call = lark.any_of(self._call(tool, "") for tool in self.tools)
        return self._rest(lark.mark(section.first), call, call)

    def _unmarked(self) -> str:
        """A section without an opening mark. Its first bracket and the first call's name are one token."""
        section, lark = self.syntax.section, self.lark
        before = section.first if section else ""
        first = lark.any_of(self._call(tool, before) for tool in self.tools)
        later = lark.any_of(self._call(tool, "") for tool in self.tools)
        return self._rest("", first, later)

    def _rest(self, first: str, call: str, later: str) -> str:
        section, lark = self.syntax.section, self.lark
        if section is None:
            return ""
        calls = call
        if self.is_parallel and not section.is_single:
            more = lark.spaced("", lark.mark(section.separator), later)
            calls = f"{call} ({lark.space()} {more})*"
        return lark.rule(lark.spaced(first, calls, lark.mark(section.last), lark.mark(section.close)))

    def _call(self, tool: Tool, before: str) -> str:
        match self.syntax.call:
            case JsonObject() as form:
                return json_object_call(self.lark, form, tool)
            case NamedJson() as form:
                return named_json_call(self.lark, form, tool)
            case Tagged() as form:
                return tagged_call(self.lark, form, tool)
            case BracedCall() as form:
                return braced_call(self.lark, form, tool)
            case PythonCall():
                return python_call(self.lark, tool, before)
        raise GrammarError("the model's chat template has no known form of calls")

    def _answer(self, excluded: str) -> str:
        if not self.has_form:
            return self._free(excluded)
        form, marks = f"@{ANSWER}", self._dropped()
        return self.lark.rule(f"({marks})? {form} ({marks})?") if marks else form

    def _free(self, excluded: str) -> str:
        """Free text, with special tokens that the family writes around an answer."""
        text, marks = self.lark.text_without(excluded), self._dropped()
        return self.lark.rule(f"{text} (({marks}) TEXT)*") if marks else text

    def _dropped(self) -> str:
        special, ends = self.tokens.special, self.tokens.ends
        marks = () if self.syntax.has_channels else self.syntax.drops
        return " | ".join(f"<[{special[mark]}]>" for mark in marks if mark in special and special[mark] not in ends)

    def channels(self, thinking_open: bool) -> str:
        """A message with headers (harmony): reasoning and remarks, and then an answer or a call."""
        lark = self.lark
        channel, message, end = channels.CHANNEL, channels.MESSAGE, channels.ENDS[0]
        following = lark.mark(f"{channels.START}assistant")
        thought = f"{self._reasoning(end)} {following}"
        analysis = lark.rule(f"{lark.mark(f'{channel}analysis{message}')} {thought}")
        before = [analysis]
        calls = [channel_call(lark, tool) for tool in self.tools]
        if not self.is_required:
            remark = f"{lark.mark(f'{channel}commentary{message}')} {lark.free_until([end])} {following}"
            before.append(lark.rule(remark))
            calls.append(lark.rule(f"{lark.mark(f'{channel}final{message}')} {self._answer('')}"))
        return f"{thought if thinking_open else ''} ({lark.any_of(before)})* {lark.any_of(calls)}"
