"""Valid bodies for every route with JSON, made from a table of variations.

The model is `agent_server`'s. The long proofs validate the answers against published schemas, and put odd values into
the bodies.
"""

from collections.abc import Iterator
from typing import Any

Fields = dict[str, Any]

USER: Fields = {"role": "user", "content": "hello"}
SYSTEM: Fields = {"role": "system", "content": "Be brief."}
UNIT: Fields = {
    "type": "object",
    "properties": {"u": {"enum": ["c", "f"]}},
    "required": ["u"],
    "additionalProperties": False,
}
FUNCTION: Fields = {"name": "f", "description": "A function.", "parameters": UNIT, "strict": True}
TOOL: Fields = {"type": "function", "function": FUNCTION}
NAMED: Fields = {"type": "function", "function": {"name": "f"}}
FORM: Fields = {"name": "n", "schema": UNIT, "strict": True}
ARGUMENTS = '{"u": "c"}'
CALL: Fields = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
RESULT: Fields = {"role": "tool", "tool_call_id": "call_1", "content": "18"}
SAMPLING: list[Fields] = [
    *({"temperature": 0}, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 2, "top_p": 0.1}, {"top_p": 1}),
]
OPENAI: list[Fields] = [
    *({}, {"seed": 7}, {"n": 2}, {"stop": "e"}, {"stop": ["a", "e", "i"], "n": 2}, {"user": "u"}, {"store": False}),
    *({"frequency_penalty": 1, "presence_penalty": -1}, {"logit_bias": {"70": 9}}, {"max_tokens": 1}),
    *({"metadata": {"a": "b"}, "user": "u"}, {"min_tokens": 8}, {"return_token_ids": True}, {"prompt_logprobs": 1}),
    *({"structured_outputs": {"choice": ["yes", "no"]}}, {"stream_options": {"include_usage": True}}),
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2},
]
CHATS: list[Fields] = [
    *({"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 1, "n": 2}),
    *({"messages": [SYSTEM, USER]}, {"messages": [{**SYSTEM, "role": "developer"}, USER]}),
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT], "tools": [TOOL]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "x"}]}, RESULT, USER]},
    {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    *({"messages": [{**USER, "name": "me"}]}, {"modalities": ["text"], "service_tier": "auto"}),
    *({"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}, "max_tokens": 40}),
    {"response_format": {"type": "json_schema", "json_schema": FORM}, "max_tokens": 60},
    {"response_format": {"type": "json_schema", "json_schema": FORM}, "max_tokens": 60, "n": 2, "logprobs": True},
    *({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "auto"}),
    *({"tools": [TOOL], "tool_choice": choice, "max_tokens": 90} for choice in ("required", NAMED)),
    {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 40},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90, "n": 2},
    {"tools": [TOOL], "tool_choice": "required", "logprobs": True, "max_tokens": 90, "temperature": 0},
    *({"chat_template_kwargs": {"enable_thinking": flag}} for flag in (True, False)),
    *({"reasoning_effort": "none"}, {"thinking_token_budget": 4}, {"include_reasoning": False}),
    {"messages": [USER, {"role": "assistant", "content": "a"}], "continue_final_message": True},
    {"prompt_cache_key": "k", "safety_identifier": "s", "stop_token_ids": [70], "include_stop_str_in_output": True},
]
COMPLETIONS: list[Fields] = [
    *({"logprobs": 0}, {"logprobs": 3, "n": 2}, {"echo": True}, {"prompt": ["a", "b"]}, {"prompt": [[70, 71], [72]]}),
    *({"prompt": [70, 71]}, {"best_of": 2, "temperature": 1}, {"regex": "[a-z]{3}"}, {"prompt": ["a", "b"], "n": 2}),
    {"response_format": {"type": "json_schema", "json_schema": FORM}, "max_tokens": 40},
]
RESPONSE_TOOL: Fields = {"type": "function", **FUNCTION}
RESPONSE_CALL: Fields = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ARGUMENTS}
OUTPUT: Fields = {"type": "function_call_output", "call_id": "c", "output": "18"}
PARTS: Fields = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
RESPONSES: list[Fields] = [
    *({}, {"instructions": "i"}, {"input": [USER]}, {"input": [SYSTEM, PARTS]}, {"max_output_tokens": 1}, LOGPROBS),
    *({**LOGPROBS, "top_logprobs": 2}, {"metadata": {"a": "b"}}, {"truncation": "disabled", "service_tier": "auto"}),
    {"input": [USER, RESPONSE_CALL, OUTPUT], "tools": [RESPONSE_TOOL]},
    {"input": [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}, USER]},
    {"input": [USER, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]}, USER]},
    *({"text": {"format": {"type": kind}}, "max_output_tokens": 40} for kind in ("text", "json_object")),
    {"text": {"format": {"type": "json_schema", **FORM}, "verbosity": "medium"}, "max_output_tokens": 60},
    *({"tools": [RESPONSE_TOOL], "tool_choice": choice} for choice in ("auto", "none")),
    {"tools": [RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 90, "parallel_tool_calls": False},
    {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 40},
    *({"reasoning": {"effort": "none"}}, {"reasoning": {"summary": "auto"}}, {"store": True, "user": "u"}),
]
CLAUDE_TOOL: Fields = {"name": "f", "description": "A function.", "input_schema": UNIT}
TOOL_USE: Fields = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"u": "c"}}]}
TOOL_RESULT: Fields = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "18"}]}
THOUGHT: Fields = {"type": "thinking", "thinking": "a", "signature": "b"}
COUNTS: list[Fields] = [
    *({}, {"system": "s"}, {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]}),
    *({"messages": [USER, TOOL_USE, TOOL_RESULT], "tools": [CLAUDE_TOOL]}, {"tools": [CLAUDE_TOOL]}),
    {"messages": [USER, {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "a"}]}, USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]},
    *({"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 20}),
    {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    *({"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}, "max_tokens": most} for most in (30, 90)),
    {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "f"}, "max_tokens": 90},
    {"output_config": {"format": {"type": "json_schema", "schema": UNIT}}, "max_tokens": 60},
]
MESSAGES: list[Fields] = [
    *({"stop_sequences": ["e"]}, {"top_k": 5}, {"metadata": {"user_id": "u"}}, {"max_tokens": 9000}),
    {"stop_sequences": ["e"], "thinking": {"type": "disabled"}},
]
OLLAMA: list[Fields] = [{}, {"think": False}, {"format": "json"}, {"format": UNIT}, {"options": {"stop": ["e"]}}]

MODEL = "tiny-agent"
SHORT: Fields = {"model": MODEL, "max_tokens": 12}
FEW: Fields = {"model": MODEL, "options": {"num_predict": 8}}
TABLE: dict[str, tuple[Fields, list[Fields]]] = {
    "/v1/chat/completions": (SHORT | {"messages": [USER]}, OPENAI + SAMPLING + CHATS),
    "/v1/completions": (SHORT | {"prompt": "a"}, OPENAI + SAMPLING + COMPLETIONS),
    "/v1/responses": ({"model": MODEL, "input": "hello", "max_output_tokens": 12}, RESPONSES + SAMPLING),
    "/v1/messages": (SHORT | {"messages": [USER]}, COUNTS + MESSAGES + SAMPLING[:2]),
    "/v1/messages/count_tokens": ({"model": MODEL, "messages": [USER]}, COUNTS),
    "/v1/embeddings": (
        {"input": "a"},
        [
            *({}, {"input": ["a", "b"]}, {"input": [70, 71]}, {"input": [[70], [71]]}, {"encoding_format": "base64"}),
            *({"dimensions": 4}, {"input": ["a", "b"], "encoding_format": "float", "user": "u"}),
        ],
    ),
    "/v1/rerank": ({"query": "a", "documents": ["b", {"text": "c"}]}, [{}, {"top_n": 1, "return_documents": False}]),
    "/v1/score": ({"text_1": "a", "text_2": ["b"]}, [{}]),
    "/tokenize": ({}, [{"prompt": "a", "return_token_strs": True}, {"messages": [USER], "tools": [TOOL]}]),
    "/detokenize": ({"tokens": [70, 71]}, [{}]),
    "/api/chat": (FEW | {"messages": [USER]}, [*OLLAMA, {"tools": [TOOL]}]),
    "/api/generate": (FEW | {"prompt": "a"}, [*OLLAMA, {"system": "s"}, {"raw": True}]),
    "/api/embed": ({"model": MODEL, "input": ["a"]}, [{}, {"truncate": False}]),
    "/api/show": ({"model": MODEL}, [{}]),
}
STREAMING = frozenset(list(TABLE)[:4])


def bodies(route: str) -> Iterator[Fields]:
    """Every body of a route. Where the route streams, each body is once whole and once streamed."""
    base, variations = TABLE[route]
    for variation in variations:
        body = base | variation
        if "count_tokens" in route:
            body.pop("max_tokens", None)
        if "stream_options" not in body:
            yield body
        if route in STREAMING and not body.keys() & {"prompt_logprobs", "best_of"}:
            yield body | {"stream": True}
