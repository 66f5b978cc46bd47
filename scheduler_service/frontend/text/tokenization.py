"""Converts text to token ids and back, with the model's tokenizer.

Special tokens in a user's text are encoded as ordinary characters, so that a message cannot end its chat turn. Encoding
runs on threads, through batch calls: for 630,000 characters, a batch call holds the GIL for 6 ms, a call for a single
text for 239 ms. Decoding a token takes 1.3 µs and runs on the event loop. Other work is cut into slices, because Python
code releases the GIL only every 5 ms.
"""

import asyncio
import os
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import tokenizers
from tokenizers.decoders import DecodeStream

from scheduler_service.frontend.rendering.chat_input import END_CHARACTERS, ChatInput, EncodedChat
from scheduler_service.frontend.rendering.chat_marks import MarkedText
from scheduler_service.frontend.rendering.encoding_errors import TooManyTokensError
from scheduler_service.frontend.text.panics import without_panic
from scheduler_service.frontend.text.tokenizer_loading import load_tokenizer

# Prompt tokens with which a detokenizer starts, because some tokenizers drop a space at the start of a text.
NUM_CONTEXT_TOKENS = 6
# Tokens at the prompt's end among which a detokenizer looks for tokens with a text.
MAX_SEARCHED_TOKENS = 256
# Tokens that may wait for a complete character. A character has at most four; a longer run is invalid bytes.
MAX_PENDING_TOKENS = 8
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


# Each call encodes on one thread. In the library's parallel mode, all calls would wait for one shared pool.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

T = TypeVar("T")


# Characters in one call into C or Rust that may hold the GIL: 1 to 2 ms. A character has at most four tokens, or 33 if
# NFKC normalization expands the character.
CHARACTERS_AT_ONCE = 1 << 12
PIECES_AT_ONCE = 256

MAX_TOKENS = 1 << 20


Text = str | tuple[str, str]


class TextFit(NamedTuple):
    """The largest number of tokens of a text, with special tokens. `cuts`: a longer text or the second text of a pair
    is cut, else refused. `keeps_end`: its last tokens are kept; by default, those that the tokenizer's files say.
    """

    most: int
    cuts: bool = False
    keeps_end: bool = False


@dataclass(frozen=True, slots=True)
class TextItem:
    """The tokens of a text or a pair of texts. `num_first_tokens`: 0 if the model does not distinguish the two."""

    token_ids: "array[int]"
    largest_id: int
    num_first_tokens: int = 0


class Tokenizer:
    """Encodes prompts on threads, those with `aside` on a separate one, and creates incremental detokenizers."""

    def __init__(self, directory: Path) -> None:
        files = load_tokenizer(directory)
        self._parsing, self._plain = files.parsing, files.plain
        self._chats = files.chats
        self._truncates_left = files.truncates_left
        self.eos_token_id = files.eos_token_id
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._side_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-aside")
        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        self.longest_token = max(map(len, vocabulary), default=1)
        self._known = bytearray(max(vocabulary.values(), default=-1) + 1)
        for token_id in vocabulary.values():
            self._known[token_id] = True
        self._not_special = self._known[:]
        added = self._parsing.get_added_tokens_decoder()
        for token_id, token in added.items():
            self._not_special[token_id] = not token.special
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        """Texts of the tokens that outputs leave out unless `skip_special_tokens` is false."""
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Ids of the tokens that the tokenizer's model does not have, special or not, by their texts."""
        self.response_template = files.response_template
        self._anchor = _anchor(self._parsing)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; "" if the model has none."""
        return "" if self._chats is None else self._chats.source

    @property
    def has_chat_template(self) -> bool:
        return self._chats is not None

    async def encode(
        self,
        text: str,
        *,
        most: int = MAX_TOKENS,
        parse_special_tokens: bool = False,
        aside: bool = False,
        begins: bool = True,
    ) -> list[int]:
        """Token ids of a text, with the model's prefix if the text begins a prompt. Raises TooManyTokensError if there
        are clearly too many."""
        tokenizer = self._parsing if parse_special_tokens else self._plain
        return await self._on_thread(lambda: _encode(tokenizer, text, most, add_special_tokens=begins), aside=aside)

    def special_ids(self, text: str) -> list[int]:
        """Token ids of a short text, in which special tokens are recognised: 10 µs on the calling thread."""
        return list(self._parsing.encode(text, add_special_tokens=False).ids)

    async def encode_texts(self, texts: Sequence[Text], fit: TextFit) -> list[TextItem]:
        """Token ids of texts or pairs, with the special tokens that the model expects.

        TooManyTokensError has the index of a text that does not fit.
        """
        return await self._on_thread(lambda: [self._encode_text(*item, fit) for item in enumerate(texts)])

    def template_names(self, word: str) -> bool:
        """Whether the model's chat template has a word, such as the name of a variable or of a role."""
        return self._chats is not None and self._chats.names(word)

    async def encode_chat(self, chat: ChatInput, *, most: int = MAX_TOKENS, aside: bool = False) -> EncodedChat:
        """Encode a chat. Raises TemplateError, TooManyTokensError or RequestError."""
        assert self._chats is not None
        text = await self._chats.render(chat, most, self.longest_token, aside=aside)
        ids = await self._on_thread(lambda: self._encode_chat(text, most), aside=aside)
        return EncodedChat(ids, text.tail(END_CHARACTERS))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, both at the start of a text and after a space."""
        return await self._on_thread(lambda: self._encode_words(words))

    async def encode_alone(self, text: str) -> list[int]:
        """Token ids of a text without special tokens around it."""
        return await self._on_thread(lambda: _encode(self._plain, text, len(text.encode())))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._parsing.token_to_id(token)
        return found

    def token(self, token_id: int) -> str:
        """A token as the vocabulary spells it; "" for an unknown id."""
        return self._parsing.id_to_token(token_id) or ""

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        def decode() -> str:
            (text,) = self._parsing.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return str(text)

        return await self._on_thread(decode, aside=True)

    async def decode_prefixes(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each prefix of the tokens, without special tokens. The cost is quadratic."""

        def decode() -> list[str]:
            prefixes = [list(token_ids[:stop]) for stop in range(1, len(token_ids) + 1)]
            return [str(text) for text in self._parsing.decode_batch(prefixes, skip_special_tokens=True)]

        return await self._on_thread(decode, aside=True)

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, decoded behind another token: the first token of a text could lose its space."""

        def decode() -> list[str]:
            alone = [[*self._anchor, token_id] for token_id in token_ids]
            anchor, *texts = self._parsing.decode_batch([self._anchor, *alone], skip_special_tokens=False)
            return [str(text).removeprefix(anchor) for text in texts]

        return await self._on_thread(decode, aside=True)

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it, such as `Ġword` for a word behind a space; "" for an unknown id."""
        return await self._on_thread(lambda: list(map(self.token, token_ids)), aside=True)

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> "Detokenizer":
        shown = self._not_special if skip_special_tokens else self._known
        end = prompt_token_ids[-MAX_SEARCHED_TOKENS:]
        context = [token_id for token_id in end if token_id < len(shown) and shown[token_id]][-NUM_CONTEXT_TOKENS:]
        return Detokenizer(self._parsing, context, shown, self._anchor, skip_special_tokens)

    async def _on_thread(self, function: Callable[[], T], *, aside: bool = False) -> T:
        threads = self._side_thread if aside else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, without_panic, function)

    def _encode_chat(self, text: MarkedText, most: int) -> list[int]:
        plain: dict[int, list[int]] = {}
        pieces = text.pieces()
        ids: list[int] = []
        while some := list(islice(pieces, PIECES_AT_ONCE)):
            encoded = self._encode_pieces([piece for piece, _ in some], most)
            for (_, number), piece_ids in zip(some, encoded, strict=True):
                ids += piece_ids
                if number is not None:
                    if number not in plain:
                        plain[number] = _encode(self._plain, text.words[number], most)
                    ids += plain[number]
                if len(ids) > 2 * most:
                    raise TooManyTokensError
        return ids

    def _encode_text(self, number: int, text: Text, fit: TextFit) -> TextItem:
        most, cuts, keeps_end = fit.most, fit.cuts, fit.keeps_end or self._truncates_left
        tokenizer, (first, second) = self._plain, (text, None) if isinstance(text, str) else text
        if second is not None and _excess(tokenizer, first, most) is not None:
            raise TooManyTokensError(number)
        last = first if second is None else second
        if (excess := _excess(tokenizer, last, most, from_end=keeps_end)) is not None:
            if not cuts:
                raise TooManyTokensError(number)
            last = last[-excess:] if keeps_end else last[:excess]
        parts = [last] if second is None else [first, last]
        (encoding,) = tokenizer.encode_batch_fast([last if second is None else (first, last)])
        if len(encoding) > most and cuts:
            encodings = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
            room = most - tokenizer.num_special_tokens_to_add(second is not None) - sum(map(len, encodings[:-1]))
            encodings[-1].truncate(max(1, room), direction="left" if keeps_end else "right")
            encoding = tokenizer.post_process(*encodings)  # type: ignore[arg-type]  # the stub allows no pair
        if len(encoding) > most:
            raise TooManyTokensError(number)
        types, token_ids = encoding.type_ids, array("I", encoding.ids)
        return TextItem(token_ids, max(token_ids, default=0), types.index(1) if 1 in types else 0)

    def _encode_pieces(self, pieces: list[str], most: int) -> Iterator[list[int]]:
        if sum(map(len, pieces)) > CHARACTERS_AT_ONCE:
            for piece in pieces:
                yield _encode(self._parsing, piece, most)
        else:
            for encoding in self._parsing.encode_batch_fast(pieces, add_special_tokens=False):
                yield encoding.ids

    def _encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        variants = dict.fromkeys(variant for word in words for variant in (word, f" {word.lstrip()}"))
        return tuple(filter(None, (tuple(_encode(self._plain, text, len(text))) for text in variants)))


def _encode(tokenizer: tokenizers.Tokenizer, text: str, most: int, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text. Raises TooManyTokensError if the text clearly has more than `most` tokens.

    Reading the ids holds the GIL for 35 ns each, so the tokens of a long text are first counted in parts.
    """
    if _excess(tokenizer, text, most) is not None:
        raise TooManyTokensError
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _excess(tokenizer: tokenizers.Tokenizer, text: str, most: int, *, from_end: bool = False) -> int | None:
    """Characters after which a text clearly exceeds `most` tokens; None if the whole text may fit."""
    parts = [text[start : start + CHARACTERS_AT_ONCE] for start in range(0, len(text), CHARACTERS_AT_ONCE)]
    if len(parts) > 1 and _most_tokens(tokenizer, parts) > most:
        num_tokens = num_characters = 0
        for part in reversed(parts) if from_end else parts:
            num_tokens += len(tokenizer.encode_batch_fast([part], add_special_tokens=False)[0])
            num_characters += len(part)
            if num_tokens > most + most // 8:  # encoding in parts gives a few more tokens
                return num_characters
    return None


def _most_tokens(tokenizer: tokenizers.Tokenizer, parts: Sequence[str]) -> int:
    """An upper bound of a text's tokens: one for each byte of its longest normalized form."""
    if tokenizer.normalizer is not None:
        parts = [unicodedata.normalize("NFKD", part) for part in parts]
    return sum(len(part.encode()) for part in parts)


def _anchor(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """A list with the token that, before decoded tokens, keeps their leading space; empty if no token does."""
    for letter in "aAeE0":
        token_id = tokenizer.token_to_id(letter)
        if token_id is not None and tokenizer.decode([token_id]) == letter:
            return [token_id]
    return []


class Detokenizer:
    """Decodes the tokens of one output one by one, and returns only whole characters.

    `shown`: for each token id, whether the token is part of the text, as unknown and skipped special tokens are not.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        context: Sequence[int],
        shown: Sequence[int],
        anchor: list[int],
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._anchor = anchor
        self._skip_special_tokens = skip_special_tokens
        # If the context tokens ended inside a character, the text of the output would repeat the text of the context.
        ends_whole = not self._decode(context).endswith(REPLACEMENT)
        self._stream = DecodeStream(list(context) if ends_whole else list(anchor), skip_special_tokens)
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        """Add a token, and return the characters that it completes."""
        if token_id >= len(self._shown) or not self._shown[token_id]:
            return ""
        self._pending.append(token_id)
        try:
            text = without_panic(lambda: self._stream.step(self._tokenizer, token_id))
        except Exception:  # the library fails if a token changes the text of the tokens before it
            return self._begin_again()
        if text is not None:
            self._pending.clear()
        elif len(self._pending) >= MAX_PENDING_TOKENS:
            return self._begin_again()
        return text or ""

    def _begin_again(self) -> str:
        """Decode pending bytes as replacement characters, except up to three at the end that may begin a character."""
        whole = self._decode(self._pending)
        for kept in range(min(3, len(self._pending) - 1), 0, -1):
            head, tail = self._pending[:-kept], self._pending[-kept:]
            if self._decode(head) + self._decode(tail) == whole:
                break
        else:
            head, tail = self._pending, []
        self._stream = DecodeStream(list(self._anchor), self._skip_special_tokens)
        self._pending = []
        return self._decode(head) + "".join(map(self.step, tail))

    def _decode(self, token_ids: Sequence[int]) -> str:
        ids = [*self._anchor, *token_ids]
        text = without_panic(lambda: self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens))
        return str(text[len(self._anchor) :])
