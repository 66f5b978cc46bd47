"""The tokenizer that a model's files describe.

Token ids, normalizer, splitter and decoder are those of tokenizer.json, whatever kind of tokenizer the other files
name: transformers 5 rebuilds them for that kind. tokenizer_config.json says which tokens are special and adds others.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import tokenizers
from tokenizers import AddedToken

from pagewire_common.model_files.json_text import loads
from pagewire_common.model_files.shown import shown
from pagewire_common.model_files.tokenizer_config import FLAGS, Token, TokenizerConfig, check_ids
from pagewire_common.start_error import StartError
from scheduler_service.frontend.text.chat_renderer import ChatRenderer

log = structlog.get_logger()

_FORMER_KEYS = {"Metaspace": ("str_rep", "add_prefix_space")}
"""Keys that files had of former releases: the library reads them, and writes others."""
_TOKENS = {("model", "vocab"), ("model", "merges")}
_FIXED_SPLIT = r"\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
"""A part of the pattern that `fix_mistral_regex` asks for."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`parsing` turns the text of a special token into that token. To `plain` the text of a `hidden` token is text.

    With `truncates_left`, a text that is too long loses its beginning.
    """

    parsing: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    hidden: tuple[str, ...]
    chats: ChatRenderer | None
    eos_token_id: int | None
    truncates_left: bool


def load_tokenizer(directory: Path) -> TokenizerFiles:
    """Raises StartError for files that say what cannot be obeyed."""
    config = TokenizerConfig.read({file.name: file for file in directory.iterdir()})
    try:
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        said = loads(text)
        parsing = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # of the library, its only class
        raise StartError(f"tokenizer.json cannot be read: {error}") from None
    _check_ids(parsing, said)  # before the library writes the vocabulary: it takes 4 bytes for each id that is missing
    read = json.loads(parsing.to_str())
    if left := next(_left_over(said, read), None):
        raise StartError(f"tokenizer.json has {left}, which this release of tokenizers does not know")
    if config.has_mistral_fix and _FIXED_SPLIT not in json.dumps(said.get("pre_tokenizer")).replace(r"\\", "\\"):
        raise StartError(
            "tokenizer_config.json sets fix_mistral_regex, and tokenizer.json has the pattern that it replaces; save "
            "the tokenizer with transformers, which writes the right one"
        )
    parsing.no_truncation()  # a prompt is never cut or filled up in silence
    parsing.no_padding()
    _add_tokens(parsing, config)
    plain = tokenizers.Tokenizer.from_str(parsing.to_str())
    plain.encode_special_tokens = True
    parsing.encode_special_tokens = config.splits_special_tokens
    known = {token.content: token for token in plain.get_added_tokens_decoder().values()}
    special = {content for content, token in known.items() if token.special}
    hidden = {*special, *config.control_tokens, *(token.content for token in config.other_special)} & known.keys()
    plain.add_special_tokens([known[content] for content in sorted(hidden - special)])
    _compare_ends(parsing, config)
    variables = {name: token.content for name, token in config.special.items()}
    return TokenizerFiles(
        parsing=parsing,
        plain=plain,
        hidden=tuple(sorted(hidden)),
        chats=None if config.chat_template is None else ChatRenderer(*config.chat_template, variables),
        eos_token_id=config.token_id("eos_token", parsing.token_to_id),
        truncates_left=config.truncates_left,
    )


def _check_ids(tokenizer: tokenizers.Tokenizer, said: Any) -> None:
    """Raise StartError where an id is not the one that the file states, which the library would only warn of."""
    known = tokenizer.get_vocab(with_added_tokens=True)
    check_ids(known, len(known), "tokenizer.json")
    for token in said.get("added_tokens") or []:
        if (found := tokenizer.token_to_id(token["content"])) != token["id"]:
            raise StartError(
                f"tokenizer.json gives the added token {shown(token['content'])} the id {token['id']}, and elsewhere "
                f"{found}, or it gives that id to two tokens"
            )
    vocabulary = said["model"].get("vocab")
    if isinstance(vocabulary, dict) and len({*vocabulary.values()}) < len(vocabulary):
        by_id: dict[int, str] = {}
        for token, token_id in vocabulary.items():
            if (other := by_id.setdefault(token_id, token)) != token:
                raise StartError(
                    f"tokenizer.json gives the id {token_id} to two tokens, {shown(other)} and {shown(token)}"
                )


def _add_tokens(tokenizer: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Tokens with the ids that tokenizer_config.json states, and the properties that it gives to tokens.

    A special token of no id is not added: nothing says which of the model's ids would be its own. Of an added token
    that the config only lists as special, tokenizer.json says whether it is shown in a text; one with a name is not.
    """
    stated = sorted(config.added.items())
    # At once: each call makes the automaton of all added tokens anew, and some models have 6,000 of them.
    tokenizer.add_tokens([_added_token(token) for _, token in stated])
    for token_id, token in stated:
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            raise StartError(
                f"tokenizer_config.json gives the token {token.content!r} the id {token_id}, "
                f"and in tokenizer.json it is {found}"
            )
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    listed = [token for token in config.other_special if token.content not in known]
    special = {token.content: token for token in (*listed, *config.special.values())}
    unknown = {content for content in special if tokenizer.token_to_id(content) is None}
    tokenizer.add_special_tokens(
        [
            known.get(content) or _added_token(token, special=True)
            for content, token in special.items()
            if content not in unknown
        ]
    )
    if unknown:
        log.warning(
            "special tokens have no id in tokenizer.json, and are text",
            tokens=[token[:100] for token in sorted(unknown)[:20]],
        )


def _added_token(token: Token, *, special: bool = False) -> AddedToken:
    flags = {name: token.flags.get(name, False) for name in FLAGS}
    flags["special"] = special or flags["special"]
    flags["normalized"] = token.flags.get("normalized", not flags["special"])
    return AddedToken(token.content, **flags)


def _compare_ends(tokenizer: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Say where tokenizer_config.json wants other tokens around a text than tokenizer.json puts there.

    tokenizer.json is right, as in transformers 5. In transformers 4 it depended on the class: Llama, Gemma and Cohere
    obeyed these keys, and others did not.
    """
    ids = tokenizer.encode("0").ids
    put = {"bos_token": ids[:1], "eos_token": ids[-1:]}
    for name, wanted in config.adds.items():
        token_id = config.token_id(name, tokenizer.token_to_id)
        if token_id is not None and (token_id in put[name]) != wanted:
            log.warning(
                f"tokenizer_config.json and tokenizer.json do not agree on add_{name}; tokenizer.json is obeyed",
                config=wanted,
                tokenizer=not wanted,
            )


def _left_over(said: Any, read: Any, path: str = "") -> Iterator[str]:
    """Keys of a file that are not among what was read of it; the vocabulary's are tokens."""
    if isinstance(said, list) and isinstance(read, list):
        for number, (one, other) in enumerate(zip(said, read, strict=False)):
            if isinstance(one, dict):
                yield from _left_over(one, other, f"{path}[{number}]")
    elif isinstance(said, dict) and isinstance(read, dict):
        former = _FORMER_KEYS.get(str(read.get("type")), ())
        for key, value in said.items():
            if key not in read and key not in former and value is not None:
                yield f"{key!r} in {path}" if path else repr(key)
            elif isinstance(value, dict | list) and (path, key) not in _TOKENS:
                yield from _left_over(value, read.get(key), f"{path}.{key}".lstrip("."))
