"""Text to token ids and back, with the tokenizer that the worker's weights were trained with.

Text that a user wrote is data: special tokens spelled out in it are encoded as ordinary characters, so nobody can
close a chat turn from inside a message. Encoding runs on threads (the library releases the GIL); decoding one token
takes about 1.3 µs and stays on the event loop.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jinja2
import tokenizers
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

# A detokenizer is primed with the end of the prompt, because some tokenizers drop a leading space at the beginning.
NUM_CONTEXT_TOKENS = 6


T = TypeVar("T")


class TemplateError(ValueError):
    """The chat template refused the messages."""


class Tokenizer:
    """Encodes prompts off the event loop and makes incremental detokenizers."""

    def __init__(self, directory: Path) -> None:
        self._transformers = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        self._parsing: tokenizers.Tokenizer = self._transformers.backend_tokenizer
        self._plain: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(self._parsing.to_str())
        self._plain.encode_special_tokens = True
        special = sorted(filter(None, self._transformers.all_special_tokens), key=len, reverse=True)
        special += [t.content for t in self._transformers.added_tokens_decoder.values() if t.special]
        self._special = re.compile("|".join(map(re.escape, dict.fromkeys(special))) or r"(?!)")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self.longest_token = max(map(len, self._parsing.get_vocab(with_added_tokens=True)), default=1)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._transformers.chat_template)

    async def encode(self, text: str, *, parse_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, with the prefix (such as a beginning-of-sequence token) that the model expects."""
        tokenizer = self._parsing if parse_special_tokens else self._plain
        return await self._on_thread(lambda: tokenizer.encode(text).ids)

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks. Raises TemplateError."""
        return await self._on_thread(lambda: self._encode_chat(messages))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens at the start of a text and after a space, without any prefix."""
        return await self._on_thread(lambda: self._encode_words(words))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._on_thread(
            lambda: self._parsing.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        )

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> "Detokenizer":
        return Detokenizer(self._parsing, prompt_token_ids[-NUM_CONTEXT_TOKENS:], skip_special_tokens)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        # Special tokens in contents are swapped for marks that no text contains, and encoded as plain text where the
        # marks come out of the template.
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        found: list[str] = []

        def hide(match: re.Match[str]) -> str:
            found.append(match.group())
            return mark

        hidden = [{**message, "content": self._special.sub(hide, message["content"])} for message in messages]
        try:
            text = self._transformers.apply_chat_template(hidden, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        pieces = text.split(mark)
        if len(pieces) != len(found) + 1:
            raise TemplateError("the model's chat template repeats or drops messages that spell out special tokens")
        ids: list[int] = self._parsing.encode(pieces[0], add_special_tokens=False).ids
        for special, piece in zip(found, pieces[1:], strict=True):
            ids += self._plain.encode(special, add_special_tokens=False).ids
            ids += self._parsing.encode(piece, add_special_tokens=False).ids
        return ids

    def _encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        variants = dict.fromkeys(variant for word in words for variant in (word, f" {word.lstrip()}"))
        return tuple(tuple(self._plain.encode(text, add_special_tokens=False).ids) for text in variants)


class Detokenizer:
    """Text of one output, a token at a time, in whole characters only."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(list(context), skip_special_tokens)

    def step(self, token_id: int) -> str:
        """The characters that this token completes; empty while one is incomplete."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # the library's own type: bytes that form no character; begin again after them
            self._stream = DecodeStream([], self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token_id) or ""
