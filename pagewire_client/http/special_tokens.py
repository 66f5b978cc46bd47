"""Special tokens that are spelled in a chat: text, as over gRPC.

The gateway reads them as what they spell, so a user's message could close its turn and begin one of the system. A chat
that spells one, and has nothing but messages of text, is put through the template by the scheduler, and its token ids
take the place of the gateway's. Of another, with tools for instance, only the gateway knows the template's input: it is
refused.
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
"""The field of a body that has them read as special tokens."""
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
    """Of the served model, whose files the scheduler is asked for once."""

    def __init__(self) -> None:
        self._pattern: re.Pattern[str] | None = None

    async def learn(self, scheduler: grpc.aio.Channel, metadata: Any) -> None:
        """Raises grpc.aio.AioRpcError."""
        if self._pattern is None:
            read = common.GetTokenizerChunk.FromString
            ask: Any = scheduler.unary_stream(_GET_TOKENIZER, response_deserializer=read)
            archive = b"".join([piece.data async for piece in ask(b"", metadata=metadata)])
            self._pattern = await asyncio.to_thread(_pattern_of, archive)

    def spelled_in(self, fields: dict[str, Any]) -> str:
        """One that the template may be given as a part of a text; empty if there is none."""
        assert self._pattern is not None
        for text in _texts([value for name, value in fields.items() if name not in _NOT_FOR_THE_TEMPLATE]):
            if found := self._pattern.search(text):
                return found[0]
        return ""


async def token_ids_of(fields: dict[str, Any], spelled: str, tokenize: Any, metadata: Any) -> list[int]:
    """Of a chat in which a special token is `spelled`. Raises HttpError, or grpc.aio.AioRpcError."""
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
    """All that a value of JSON has, names too, the text parts of one content as the one text that a template makes of
    them, and what a text has that is JSON itself, such as a call's arguments, which a template is given as values."""
    rest = [value]
    while rest:
        match rest.pop():
            case str(text):
                yield text
                if "\\" in text:  # without it the text itself has all that its values have
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
    """Finds the special tokens that a model's files name."""
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
    """An expression for any of these sorted words: a trie, because some models have a thousand that begin alike, and
    each of them would be tried at each place of a text. A word that another begins with stands for both."""
    if "" in words:
        return ""
    branches = []
    for _, group in groupby(words, key=lambda word: word[0]):
        same = list(group)
        pairs = zip(same[0], same[-1], strict=False)  # the first and the last in order differ where any do
        start = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        branches.append(re.escape(start) + _any_of([word[len(start) :] for word in same]))
    return f"(?:{'|'.join(branches)})"
