"""Special tokens that are spelled in a chat. A special token in a chat is treated as text, as over gRPC.

The gateway would parse such text as special tokens, so a user's message could close its turn and begin a system turn.
If a chat spells a special token and all its messages are text, the scheduler renders and encodes the chat. The
scheduler's token ids replace the gateway's token ids. Any other chat that spells a special token is refused: for
example, a chat with tools. For a chat with tools, only the gateway knows the template's input.
"""

import asyncio
import contextlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from itertools import groupby, takewhile
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as common

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.http.errors import invalid
from pagewire_client.http.unread import is_unicode
from pagewire_common.sampling import NUMBERS

PARSE = "parse_special_tokens"
"""Name of the body's field that allows special tokens to be parsed."""
_NOT_FOR_THE_TEMPLATE = frozenset(
    (
        *("model", "user", "n", "seed", "stream", "stream_options", "stop", "stop_token_ids", "ignore_eos", "rid"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs"),
        *("logit_bias", "skip_special_tokens", "response_format", "regex", "ebnf", "json_schema"),
        *NUMBERS,
    )
)
_GET_TOKENIZER = "/vllm.grpc.engine.VllmEngine/GetTokenizer"
_OF_A_MESSAGE = frozenset(("role", "content"))


class SpecialTokens:
    """The special tokens of the served model. The special tokens are read once, from the model's files that the
    scheduler sends.
    """

    def __init__(self) -> None:
        self._pattern: re.Pattern[str] | None = None

    async def learn(self, scheduler: grpc.aio.Channel, metadata: Any) -> None:
        """Fetch the model's files. Raises grpc.aio.AioRpcError."""
        if self._pattern is None:
            read = common.GetTokenizerChunk.FromString
            ask: Any = scheduler.unary_stream(_GET_TOKENIZER, response_deserializer=read)
            archive = b"".join([piece.data async for piece in ask(b"", metadata=metadata)])
            self._pattern = await asyncio.to_thread(_pattern_of, archive)

    def spelled_in(self, fields: dict[str, Any]) -> str:
        """The text of a special token that occurs in the input of the chat template. The result is empty if no text
        contains a special token.
        """
        assert self._pattern is not None
        for text in _texts([value for name, value in fields.items() if name not in _NOT_FOR_THE_TEMPLATE]):
            if found := self._pattern.search(text):
                return found[0]
        return ""


async def token_ids_of(fields: dict[str, Any], spelled: str, tokenize: Any, metadata: Any) -> list[int]:
    """The scheduler's token ids of a chat in which the text of the special token `spelled` occurs. Raises HttpError and
    grpc.aio.AioRpcError.
    """
    chat = pb.Chat()
    messages = fields.get("messages")
    given = {name for name, value in fields.items() if value is not None}
    is_plain = given <= _NOT_FOR_THE_TEMPLATE | {"messages"} and isinstance(messages, list)
    for message in messages if is_plain and isinstance(messages, list) else ():
        is_plain = is_plain and isinstance(message, dict) and message.keys() == _OF_A_MESSAGE
        if is_plain := is_plain and all(isinstance(text, str) for text in message.values()):
            if not all(map(is_unicode, message.values())):
                raise invalid("messages: a text has half of a surrogate pair, which no character is written with")
            chat.messages.add(**message)
    if not is_plain:
        raise invalid(
            f"a text has {spelled!r} in it, a special token, which is only taken as text in a chat of messages that "
            f"have a role and a text each, and nothing else for the template; with {PARSE} true it counts as the token"
        )
    return list((await tokenize(pb.TokenizeRequest(chat=chat), metadata=metadata)).token_ids)


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, names included.

    The text parts of one content are also yielded as one string, because a template joins text parts. If a string is
    JSON itself, for example the arguments of a tool call, the strings in this JSON are yielded too: a chat template
    receives them as values.
    """
    rest = [value]
    while rest:
        match rest.pop():
            case str(text):
                yield text
                if "\\" in text:  # without escapes, the JSON text contains its strings unchanged
                    with contextlib.suppress(ValueError, RecursionError):
                        rest.append(json.loads(text))
            case dict(members):
                rest += members.keys()
                rest += members.values()
            case list(items):
                rest += items
                parts = [item.get("text") for item in items if isinstance(item, dict)]
                yield "".join(part for part in parts if isinstance(part, str))


def _pattern_of(archive: bytes) -> re.Pattern[str]:
    """A pattern that finds the special tokens that a model's files define."""
    special: set[str] = set()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for name, member in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
            if name in files.namelist():
                tokens = json.loads(files.read(name)).get(member, ())
                tokens = tokens.values() if isinstance(tokens, dict) else tokens
                special.update(token["content"] for token in tokens if token.get("special"))
    special.discard("")
    return re.compile(_any_of(sorted(special)) if special else r"(?!)")


def _any_of(words: list[str]) -> str:
    """A regular expression that matches any of the words, in the form of a trie. The caller passes the words in sorted
    order.

    Some models have a thousand special tokens with the same beginning. With a plain list of alternatives, Python's `re`
    would try word by word at each position of a text. If a word is a prefix of another word, the expression matches the
    prefix for both.
    """
    if "" in words:
        return ""
    branches = []
    for _, group in groupby(words, key=lambda word: word[0]):
        same = list(group)
        # the words are sorted, so the first and the last word have only the prefix in common that all words have
        pairs = zip(same[0], same[-1], strict=False)
        start = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        branches.append(re.escape(start) + _any_of([word[len(start) :] for word in same]))
    return f"(?:{'|'.join(branches)})"
