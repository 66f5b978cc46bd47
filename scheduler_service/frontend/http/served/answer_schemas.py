"""JSON schemas of the answers of the HTTP routes: the fields that clients may rely on."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def has(**fields: Schema) -> Schema:
    """An object with at least these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def may_have(schema: Schema, **fields: Schema) -> Schema:
    return schema | {"properties": schema["properties"] | fields}


ERROR = has(error=has(message=TEXT, type=TEXT, code=maybe(TEXT), param=maybe(TEXT)))
USAGE = may_have(has(prompt_tokens=COUNT, total_tokens=COUNT), completion_tokens=COUNT)
_CALL = has(id=TEXT, type=one_of("function"), function=has(name=TEXT, arguments=TEXT))
_FINISH = one_of("stop", "length", "tool_calls", "abort", "error")
_MESSAGE = may_have(has(role=one_of("assistant"), content=maybe(TEXT)), tool_calls=many(_CALL))
CHAT = has(
    id=TEXT,
    object=one_of("chat.completion"),
    created=COUNT,
    model=TEXT,
    choices=many(has(index=COUNT, message=_MESSAGE, finish_reason=_FINISH)),
    usage=USAGE,
)
COMPLETION = has(
    id=TEXT,
    object=one_of("text_completion"),
    created=COUNT,
    model=TEXT,
    choices=many(has(index=COUNT, text=TEXT, finish_reason=_FINISH)),
    usage=USAGE,
)
RESPONSE = has(
    id=TEXT,
    object=one_of("response"),
    created_at=NUMBER,
    status=one_of("completed", "incomplete", "failed", "in_progress"),
    model=TEXT,
    output=many(has(type=TEXT)),
)
RESPONSE_ITEMS = has(object=one_of("list"), data=many(ANY), has_more=FLAG)
RESPONSE_DELETED = has(id=TEXT, object=TEXT, deleted=FLAG)
EMBEDDINGS = has(
    object=one_of("list"),
    model=TEXT,
    data=many(has(index=COUNT, object=one_of("embedding"), embedding={"anyOf": [many(NUMBER), TEXT]})),
    usage=USAGE,
)
_VECTOR: Schema = {"anyOf": [many(NUMBER), many(many(NUMBER)), TEXT]}
POOLED = has(object=one_of("list"), model=TEXT, data=many(has(index=COUNT, data=_VECTOR)), usage=USAGE)
COHERE_EMBEDDINGS = has(id=TEXT, texts=many(TEXT), embeddings=ANY, meta=ANY)
SCORES = has(object=one_of("list"), data=many(has(index=COUNT, score=NUMBER)), usage=USAGE)
RANKS = has(model=TEXT, results=many(has(index=COUNT, relevance_score=NUMBER)))
TOKENS = has(count=COUNT, max_model_len=COUNT, tokens=many(COUNT))
DETOKENIZED = has(prompt=TEXT)
MODEL = has(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT)
MODELS = has(object=one_of("list"), data=many(MODEL))
VERSION = has(version=TEXT)
LOAD = has(server_load=COUNT)
TOKENIZER = has(tokenizer_class=TEXT, model_max_length=COUNT, vocabulary_size=COUNT, chat_template=maybe(TEXT))
TRANSCRIPT = has(text=TEXT)
ANTHROPIC_ERROR = has(type=one_of("error"), error=has(type=TEXT, message=TEXT))
ANTHROPIC_MESSAGE = has(
    id=TEXT,
    type=one_of("message"),
    role=one_of("assistant"),
    model=TEXT,
    content=many(has(type=TEXT)),
    stop_reason=maybe(TEXT),
    usage=has(input_tokens=COUNT, output_tokens=COUNT),
)
TOKEN_COUNT = has(input_tokens=COUNT)
OLLAMA_ERROR = has(error=TEXT)
OLLAMA_CHAT = has(model=TEXT, created_at=TEXT, message=has(role=TEXT, content=TEXT), done=FLAG)
OLLAMA_TEXT = has(model=TEXT, created_at=TEXT, response=TEXT, done=FLAG)
OLLAMA_EMBEDDINGS = has(model=TEXT, embeddings=many(many(NUMBER)))
OLLAMA_MODEL = has(details=ANY, model_info=ANY, capabilities=many(TEXT))
OLLAMA_MODELS = has(models=many(has(name=TEXT, model=TEXT, details=ANY)))
