"""The tables of docs/openai.md that are made from the code: `python tests/http_tables.py` writes them into the page.

Each table stands between two comments, of which the first has the table's name. tests/test_docs.py compares them.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic.fields import FieldInfo

from pagewire_common.sampling import PARAMETERS
from scheduler_service.frontend.chat import families
from scheduler_service.frontend.chat.calls import channels
from scheduler_service.frontend.chat.syntax import BracedCall, ChatSyntax, JsonObject, NamedJson, PythonCall, Tagged
from scheduler_service.frontend.http import errors
from scheduler_service.frontend.http.body import Fields, Part, Texts
from scheduler_service.frontend.http.openai import transcriptions
from scheduler_service.frontend.http.openai.chat_fields import ChatFields
from scheduler_service.frontend.http.openai.completion_fields import CompletionFields
from scheduler_service.frontend.http.openai.sampling_fields import SamplingFields
from scheduler_service.frontend.http.routes import OPENAI, ROUTES, find_api

PAGE = Path(__file__).parents[1] / "docs" / "openai.md"
HTTP = Path(errors.__file__).parent
_TABLE = re.compile(r"<!-- table (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)

NOTES = {
    "ChatFields.echo": "the answer begins with the last message, if it is the assistant's",
    "ResponseFields.include": "only the first two values change the answer",
    "ResponseFields.metadata": "repeated in the answer",
    "ResponseFields.store": "the response is [kept](responses.md#stored-responses)",
    "cache_salt": "requests with different salts share no cached prompts",
    "chat_template_kwargs": "variables of the chat template",
    "continue_final_message": "the last message is continued",
    "RerankFields.documents": "",
    "ScoreFields.documents": "",
    "data_1": "older name of `queries`",
    "data_2": "older name of `documents`",
    "documents": "passed to the chat template",
    "embed_dtype": "number type in base64 and bytes; refused with `float`",
    "encoding_format": "with `bytes`, a header describes the vectors of up to 256 texts",
    "endianness": "byte order in base64 and bytes; refused with `float`",
    "input_type": "refused",
    "items": "another name of `documents`",
    "task": "`token_embed`: a vector for each token",
    "text_1": "older name of `queries`",
    "text_2": "older name of `documents`",
    "use_activation": "vLLM's name of `normalize`",
    "echo": "the answer begins with the prompt",
    "guided_choice": "older name of `structured_outputs.choice`",
    "guided_grammar": "older name of `structured_outputs.grammar`",
    "guided_json": "older name of `structured_outputs.json`",
    "guided_regex": "older name of `structured_outputs.regex`",
    "include_reasoning": "`false` leaves reasoning out of the answer",
    "max_completion_tokens": "newer name of `max_tokens`",
    "metadata": "no effect",
    "model": "the served model or an adapter; by default the model",
    "parallel_tool_calls": "`false`: at most one call",
    "parse_special_tokens": "special tokens in texts count as special tokens",
    "priority": "with `--scheduling-policy priority`, lower numbers run first",
    "prompt_cache_key": "no effect",
    "prompt_embeds": "safetensors in base64: [embeddings](api.md#prompts-of-parts) of a prompt, or of several prompts",
    "reasoning_effort": "effort of [thinking](#tools-and-thinking)",
    "request_id": "the request's name",
    "return_token_ids": "the answer has the token ids",
    "return_token_strs": "the answer has each token as the vocabulary spells it, such as `Ġword`",
    "return_tokens_as_token_ids": "log-probabilities name tokens by their ids",
    "safety_identifier": "no effect",
    "service_tier": "no effect",
    "store": "`true` is refused",
    "thinking_token_budget": "maximum number of reasoning tokens; after them, the closing mark is forced",
    "truncation_side": "`right`: truncation keeps the first tokens",
    "truncate_prompt_tokens": "number of tokens to keep, from the end; -1: as many as fit",
    "use_beam_search": "`true`: beam search; the number of beams is the larger of `n` and `best_of`",
    "user": "no effect",
}
"""Notes on fields, by name or by body and name, where the type does not say enough."""
STATUSES = {
    400: "the body is no JSON object, a field is unknown or out of range, or the prompt is empty or too long",
    401: "the API key is missing or unknown",
    403: "the API key may not use the model or the adapter",
    404: "the model is not served, or the route does not exist",
    408: "the body does not arrive within `--receive-timeout`",
    409: "`request_id` names a request that is in flight, or `Last-Event-ID` belongs to another request",
    413: "the body is too large",
    415: "the body is compressed, or its content type is not `application/json`",
    429: "the queue is full, or the key's quota is used up",
    500: "an error of the server; the log has the details",
    501: "the model does not support the route",
    503: "no worker serves, the server stops, or bodies and answers in memory reach a limit",
}
EXAMPLES = {
    "harmony": "gpt-oss",
    "gemma-4": "Gemma 4",
    "minimax": "MiniMax M2",
    "glm": "GLM-4.5 and newer",
    "qwen-xml": "Qwen3-Coder, Qwen3.5",
    "deepseek-v3": "DeepSeek V3, R1",
    "deepseek-v3.1": "DeepSeek V3.1",
    "kimi-k2": "Kimi K2",
    "cohere": "Command A",
    "mistral-named": "Mistral Small 3.2, Magistral",
    "mistral-list": "Mistral 7B v0.3, Nemo",
    "olmo-3": "Olmo 3",
    "phi-4-mini": "Phi-4-mini",
    "functools": "Phi-4-mini, older template",
    "granite": "Granite 3",
    "hermes": "Qwen2.5, Qwen3, Hermes, SmolLM3, Granite 4",
    "llama-python": "Llama 3.2 and 4, with calls in Python",
    "llama-json": "Llama 3.1, 3.2, 3.3",
}
"""Models of each family."""


# ---- fields


def body_of(route: Callable[..., Any]) -> type[Part] | None:
    """The fields of a route's JSON body: the class that the route reads. None if the route reads no JSON."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(route)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fields":
            return inspect.getmodule(route).__dict__[node.args[0].id]  # type: ignore[attr-defined, union-attr]
    return None


def field_tables() -> Iterator[str]:
    """A heading and a table for each body."""
    routes: dict[type[Part], list[str]] = {}
    for name, route in ROUTES.items():
        if find_api(name.partition(" ")[2]) is OPENAI and (body := body_of(route)) is not None:
            routes.setdefault(body, []).append(f"`{name.partition(' ')[2]}`")
    yield f"**Every JSON body**\n\n{_table(Fields, Fields.model_fields)}"
    common = SamplingFields.model_fields
    parameters = ", ".join(f"`{name}`" for name in sorted(common) if name in PARAMETERS)
    further = {name: field for name, field in common.items() if name not in {*Fields.model_fields, *PARAMETERS}}
    yield _wrapped(
        f"**{', '.join(routes[ChatFields] + routes[CompletionFields])}** have the [sampling parameters](sampling.md) "
        f"{parameters}. Both also have:"
    )
    yield _table(SamplingFields, further)
    for body, names in routes.items():
        same = next((base for base in body.__mro__[1:] if base in routes), None)
        hidden = common if issubclass(body, SamplingFields) else Fields.model_fields
        if same is not None:
            hidden = {name: field for name, field in same.model_fields.items() if name not in body.__annotations__}
        own = {name: field for name, field in body.model_fields.items() if name not in hidden}
        more = f" has the fields of {routes[same][0]}, and" if same else ""
        yield f"**{', '.join(names)}**{more}\n\n{_table(body, own)}"
    texts = [f"`{name}`" for name in transcriptions.KNOWN]
    formats = ", ".join(f"`{name}`" for name in transcriptions.FORMATS)
    granularities = ", ".join(f"`{name}`" for name in sorted(transcriptions.GRANULARITIES))
    sound = ", ".join(f"`{name.partition(' ')[2]}`" for name, route in ROUTES.items() if "/audio/" in name)
    yield _wrapped(
        f"**{sound}** read a form. Its parts are {', '.join(texts)} and `{transcriptions.GRANULARITY}[]`. "
        f"The values of `response_format` are {formats}. The granularities are {granularities}."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(body: type[Part], fields: Mapping[str, FieldInfo]) -> str:
    rows = ["| field | values | |", "|---|---|---|"]
    for name, field in sorted(fields.items()):
        shown = field.alias or name
        need = "required" if field.is_required() else NOTES.get(f"{body.__name__}.{name}", NOTES.get(shown, ""))
        rows.append(f"| `{shown}` | {_shown(field.annotation, field.metadata)} | {need} |")
    return "\n".join(rows) + "\n"


def _shown(kind: Any, limits: list[Any]) -> str:
    """A type with its limits, in words."""
    if kind is Texts:
        return "text, token ids, or a list of either"
    if hasattr(kind, "__metadata__"):
        inner, *more = get_args(kind)
        limits = [one for part in more for one in getattr(part, "metadata", [part])] + limits
        return _shown(inner, limits)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = dict.fromkeys(_shown(part, limits) for part in parts if part is not NoneType)
        return " or ".join(kinds)
    if origin is Literal:
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in parts)
    if origin is list:
        most = next((f", at most {one.max_length:,}" for one in limits if isinstance(one, MaxLen)), "")
        return f"list of {_plural(_shown(parts[0], []))}{most}"
    if kind is bool:
        return "`true`, `false`"
    if kind is int:
        return f"integer{_range(limits)}"
    if kind is float:
        return f"number{_range(limits)}"
    if kind is str:
        most = next((f", at most {one.max_length:,} characters" for one in limits if isinstance(one, MaxLen)), "")
        return f"text{most}"
    if inspect.isclass(kind) and hasattr(kind, "model_fields"):
        return f"object with {', '.join(f'`{field.alias or name}`' for name, field in kind.model_fields.items())}"
    return "object"


def _plural(text: str) -> str:
    return re.sub(r"(?<!`)\b(text|object|integer|number|list)\b", r"\1s", text)


def _range(limits: list[Any]) -> str:
    low = next((one.ge for one in limits if isinstance(one, Ge)), None)
    low = next((one.gt for one in limits if isinstance(one, Gt)), low)
    high = next((one.le for one in limits if isinstance(one, Le)), None)
    high = next((one.lt - 1 for one in limits if isinstance(one, Lt)), high)
    if high is not None and high >= (1 << 31) - 1:
        high = None
    if low is not None and low <= -(1 << 31):
        low = None
    if low is None:
        return "" if high is None else f", at most {high}"
    return f", at least {low}" if high is None else f", {low} to {high}"


# ---- statuses


def status_table() -> str:
    """The statuses and codes of errors. The codes are those of each `HttpError` in the code."""
    codes: dict[int, set[str]] = {}
    for status, code in errors._STATUSES.values():
        codes.setdefault(status, set()).add(code)
    for file in HTTP.rglob("*.py"):
        for status, code in re.findall(r'HttpError\((\d{3}), "(\w+)"', file.read_text()):
            codes.setdefault(int(status), set()).add(code)
    codes.setdefault(503, set()).add("service_unavailable")
    rows = [f"| {status} | {', '.join(f'`{code}`' for code in sorted(codes[status]))} | {STATUSES[status]} |"
            for status in sorted(codes)]  # fmt: skip
    return "\n".join(["| status | `error.code` | when |", "|---|---|---|", *rows]) + "\n"


# ---- families


def family_table() -> str:
    """The families in the order in which a chat template is compared with them."""
    rows: dict[str, tuple[list[str], ChatSyntax]] = {}
    for words, syntax in families._ROWS:
        told = " and ".join(map(_code, words))
        rows.setdefault(syntax.family, ([], syntax))[0].append(told)
    table = ["| family | models, for example | the chat template contains | a call |", "|---|---|---|---|"]
    for name, (told, syntax) in rows.items():
        table.append(f"| {name} | {EXAMPLES[name]} | {', or '.join(told)} | {_code(call_of(syntax))} |")
    return "\n".join(table) + "\n"


def _code(text: str) -> str:
    """Code in a cell of a table, in one line."""
    text = text.replace("\n", "⏎").replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def call_of(syntax: ChatSyntax) -> str:
    """A call of the tool `f` with the argument `a`, as the family writes it."""
    arguments = '{"a": "b"}'
    if syntax.has_channels:
        head = f"{channels.CHANNEL}commentary to=functions.f {channels.CONSTRAIN}json"
        return f"{head}{channels.MESSAGE}{arguments}{channels.ENDS[2]}"
    match syntax.call:
        case JsonObject() as form:
            call_id = f'"{form.id_key}": "0", ' if form.writes_id else ""
            call = f'{{{call_id}"{form.name_key}": "f", "{form.arguments_key}": {arguments}}}'
        case NamedJson() as form:
            number = ":0" if form.is_numbered else ""
            call = f"{form.open}{form.prefix}f{number}{form.before_arguments}{arguments}{form.close}"
        case Tagged() as form:
            line = "\n" if form.has_lines else ""
            value = f"{form.key_open}a{form.key_end}{form.value_open}{line}b{line}{form.value_close}"
            call = f"{line}{form.open}f{form.name_end}{line}{value}{line}{form.close}{line}"
        case PythonCall():
            call = 'f(a="b")'
        case BracedCall() as form:
            call = f"{form.open}f{{a:{form.quote}b{form.quote}}}"
        case _:
            raise AssertionError(syntax.family)
    section = syntax.section
    assert section is not None
    return f"{section.opens[0]}{section.first}{call}{section.last}{section.close}"


# ---- the page

TABLES: dict[str, Callable[[], str]] = {
    "families": family_table,
    "fields": lambda: "\n".join(field_tables()),
    "statuses": status_table,
}


def written(page: str) -> str:
    """The page with all tables as the code has them."""
    return _TABLE.sub(lambda found: f"<!-- table {found[1]} -->\n\n{TABLES[found[1]]()}\n<!-- end -->\n", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
