"""Loads the tokenizer from a model's files.

Token ids, normalizer, pre-tokenizer and decoder come from tokenizer.json alone; transformers 5 rebuilds them for the
tokenizer class in other files.
"""

import json
from collections.abc import Iterator, Mapping
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
from scheduler_service.frontend.rendering.chat_renderer import ChatRenderer

log = structlog.get_logger()

_FORMER_KEYS = {"Metaspace": ("str_rep", "add_prefix_space")}
"""Keys of tokenizer.json from old releases of the library, which reads these keys but writes newer keys."""
_TOKENS = {("model", "vocab"), ("model", "merges")}
_FIXED_SPLIT = r"\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
"""A part of the pre-tokenizer's pattern that the setting `fix_mistral_regex` requires."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The loaded tokenizers of a model, and their settings.

    `parsing`: encodes a special token's text as the special token.
    `plain`: encodes the text of a special token (of `hidden`) as ordinary characters.
    `truncates_left`: a text that is too long loses its beginning, not its end.
    """

    parsing: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    hidden: tuple[str, ...]
    chats: ChatRenderer | None
    eos_token_id: int | None
    truncates_left: bool
    response_template: Mapping[str, Any] | None = None


def load_tokenizer(directory: Path) -> TokenizerFiles:
    """Raises StartError for unsupported settings."""
    config = TokenizerConfig.read({file.name: file for file in directory.iterdir()})
    try:
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        said = loads(text)
        parsing = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no subclass of Exception
        raise StartError(f"tokenizer.json cannot be read: {error}") from None
    _check_ids(parsing, said)  # before `to_str`, which takes 4 bytes for each missing token id
    read = json.loads(parsing.to_str())
    if left := next(_left_over(said, read), None):
        raise StartError(f"tokenizer.json has {left}, which this release of tokenizers does not know")
    if dropout := read["model"].get("dropout"):
        raise StartError(
            f"tokenizer.json has dropout {dropout:g} in model, which is for training: a text would have other tokens "
            "each time; remove the key"
        )
    if config.has_mistral_fix and _FIXED_SPLIT not in json.dumps(said.get("pre_tokenizer")).replace(r"\\", "\\"):
        raise StartError(
            "tokenizer_config.json sets fix_mistral_regex, and tokenizer.json has the pattern that it replaces; save "
            "the tokenizer with transformers, which writes the right one"
        )
    parsing.no_truncation()  # otherwise prompts could be cut or padded silently
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
    chats = None
    if config.chat_template is not None:
        chats = ChatRenderer(*config.chat_template, variables, sorted(hidden))
    return TokenizerFiles(
        parsing=parsing,
        plain=plain,
        hidden=tuple(sorted(hidden)),
        chats=chats,
        eos_token_id=config.token_id("eos_token", parsing.token_to_id),
        truncates_left=config.truncates_left,
        response_template=config.response_template,
    )


def _check_ids(tokenizer: tokenizers.Tokenizer, said: Any) -> None:
    """Raise StartError if a token's id differs from its id in tokenizer.json, for which the library would only warn."""
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
    """Add the tokens of tokenizer_config.json, except special tokens without an id.

    A special token with a role, such as `eos_token`, is skipped when outputs are decoded. For a token that the file
    only lists as special, tokenizer.json decides.
    """
    stated = sorted(config.added.items())
    # Each call rebuilds the automaton of all added tokens, of which some models have 6,000.
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
    """Log a warning if the tokenizer's two files disagree about the special tokens around a text.

    tokenizer.json takes precedence, as in transformers 5. In transformers 4, the classes of Llama, Gemma and Cohere
    obeyed `add_bos_token` and `add_eos_token` of tokenizer_config.json.
    """
    ids = tokenizer.encode("0").ids
    put = {"bos_token": ids[:1], "eos_token": ids[-1:]}
    for name, wanted in config.adds.items():
        token_id = config.token_id(name, tokenizer.token_to_id)
        if token_id is not None and (token_id in put[name]) != wanted:
            log.warning(
                f"tokenizer_config.json and tokenizer.json do not agree on add_{name}; tokenizer.json takes precedence",
                config=wanted,
                tokenizer=not wanted,
            )


def _left_over(said: Any, read: Any, path: str = "") -> Iterator[str]:
    """Keys of tokenizer.json that the library did not read, without those of the vocabulary, which are tokens."""
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
