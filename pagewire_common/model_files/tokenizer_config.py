"""Reads tokenizer_config.json, or the older files that contain parts of its settings in some folders.

Each known key is applied, refused, or ignored for a stated reason. Unknown keys are logged, because any tokenizer class
may have keys of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from pagewire_common.model_files.json_text import loads
from pagewire_common.model_files.shown import shown
from pagewire_common.start_error import StartError

log = structlog.get_logger()

FILE = "tokenizer_config.json"
MAX_MORE = 1 << 16
"""Tokens that a tokenizer may have beyond the model's vocabulary. Memory grows with the largest token id."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OBEYED = (
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"),
    *("chat_template", "chat_control_tokens", "split_special_tokens", "truncation_side", "fix_mistral_regex"),
    *("add_bos_token", "add_eos_token", "response_template"),
)
_LEFT_OUT = {
    "they say which program made the files, from which others": (
        *("tokenizer_class", "processor_class", "auto_map", "backend", "transformers_version", "tokenizers_version"),
        *("name_or_path", "_name_or_path", "_commit_hash", "_from_auto", "is_local", "local_files_only", "revision"),
        *("trust_remote_code", "use_fast", "from_slow", "init_inputs", "vocab_file", "merges_file", "tokenizer_file"),
        *("special_tokens_map_file", "files_loaded", "cache_dir", "device_map", "torch_dtype", "dtype", "verbose"),
    ),
    "they are arguments of the class that made tokenizer.json, which has the result": (
        *("add_prefix_space", "legacy", "sp_model_kwargs", "unk_id", "vocab_size", "errors", "trim_offsets"),
        *("do_lower_case", "strip_accents", "tokenize_chinese_chars", "do_basic_tokenize", "never_split", "clean_text"),
        *("wordpieces_prefix", "remove_space", "keep_accents", "extra_ids", "offset", "split_by_punct", "vocab_type"),
        *("src_lang", "tgt_lang", "language", "task", "predict_timestamps", "language_codes", "do_normalize"),
        *("normalization", "spaces_between_special_tokens", "add_dummy_prefix", "from_flax", "from_tf", "normalize"),
    ),
    "a prompt is never cut or filled up unasked, and the worker says how long one may be": (
        *("model_max_length", "max_len", "max_length", "truncation", "truncation_strategy", "stride", "padding"),
        *("padding_side", "pad_to_multiple_of", "pad_token_type_id", "model_input_names", "return_token_type_ids"),
        *("return_attention_mask", "return_tensors"),
    ),
    "they change text after it was decoded; a streamed text is what its tokens say, as vLLM's is": (
        "clean_up_tokenization_spaces",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    ),
    "response_template is its newer form": ("response_schema",),
    "it chose among templates that libraries had before models came with their own": ("use_default_system_prompt",),
}
_MAY_BE_LEFT_OUT = frozenset(key for keys in _LEFT_OUT.values() for key in keys)


@dataclass(frozen=True, slots=True)
class Token:
    """A token's text, and the members of FLAGS that the file sets for it."""

    content: str
    flags: Mapping[str, bool] = field(default_factory=dict)


class ChatTemplateSource(NamedTuple):
    text: str
    file: str


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """A tokenizer's settings.

    `special`: special tokens with a name (such as eos_token).
    `other_special`: special tokens without a name.
    `added`: tokens whose ids the file states.
    `control_tokens`: tokens that a user's text must not become, even if it spells them.
    `adds`: whether bos_token and eos_token are put around a text, if the file states it.
    """

    special: Mapping[str, Token] = field(default_factory=dict)
    other_special: tuple[Token, ...] = ()
    added: Mapping[int, Token] = field(default_factory=dict)
    control_tokens: tuple[str, ...] = ()
    splits_special_tokens: bool = False
    truncates_left: bool = False
    has_mistral_fix: bool = False
    adds: Mapping[str, bool] = field(default_factory=dict)
    chat_template: ChatTemplateSource | None = None
    response_template: Mapping[str, Any] | None = None
    """How the model writes reasoning and tool calls, in transformers' declarative format."""

    @classmethod
    def read(cls, files: Mapping[str, Path]) -> "TokenizerConfig":
        """Read the files of a model's folder, given by name. Raises StartError, which names the key."""
        config = _object(files, FILE)
        # older folders store added tokens and special tokens in separate files
        if "added_tokens_decoder" not in config:
            config |= _object(files, "special_tokens_map.json")
        special = {key: _token(key, value) for key, value in config.items() if _names_a_token(key, value)}
        named = config.get("model_specific_special_tokens") or {}
        _check("model_specific_special_tokens", named, dict, "an object of tokens")
        special |= {key: _token(key, value) for key, value in named.items()}
        others: dict[str, Token] = {}  # by text, because two keys may list the same token
        # transformers' newer name of this list
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = config.get(key) or []
            if isinstance(listed, dict):
                special |= {name: _token(key, value) for name, value in listed.items()}
            else:
                _check(key, listed, list, "a list or an object of tokens")
                others |= {token.content: token for token in (_token(key, value) for value in listed)}
        other_special = tuple(others.values())
        if unknown := sorted(config.keys() - special.keys() - {*_STANDARD, *_OBEYED} - _MAY_BE_LEFT_OUT):
            log.warning(
                f"unknown keys of {FILE} are left out; token ids are those of tokenizer.json",
                keys=[key[:100] for key in unknown[:20]],
            )
        side = config.get("truncation_side", "right")
        if side not in ("left", "right"):
            raise StartError(f"{FILE} has {shown(side)} as truncation_side; it must be 'left' or 'right'")
        control = config.get("chat_control_tokens") or []
        _check("chat_control_tokens", control, list, "a list of texts")
        if (response := config.get("response_template")) is not None:
            _check("response_template", response, dict, "an object")
        return cls(
            special=special,
            other_special=other_special,
            added=_added(config, files, {token.content for token in (*special.values(), *other_special)}),
            control_tokens=tuple(_token("chat_control_tokens", value).content for value in control),
            splits_special_tokens=_flag(config, "split_special_tokens"),
            truncates_left=side == "left",
            has_mistral_fix=_flag(config, "fix_mistral_regex"),
            adds={key: _flag(config, f"add_{key}") for key in ("bos_token", "eos_token") if f"add_{key}" in config},
            chat_template=_chat_template(config, files),
            response_template=response,
        )

    def token_id(self, name: str, find: Callable[[str], int | None]) -> int | None:
        """The id of the special token with the given name. `find` looks up a token's text in tokenizer.json."""
        if (token := self.special.get(name)) is None:
            return None
        stated = (token_id for token_id, added in self.added.items() if added.content == token.content)
        return next(stated, None) if (token_id := find(token.content)) is None else token_id


def _names_a_token(key: str, value: object) -> bool:
    if key in _STANDARD:
        return value is not None and value != ""
    return key.endswith("_token") and key not in _OBEYED and isinstance(value, str | dict) and value != ""


def _token(key: str, value: object) -> Token:
    if isinstance(value, str):
        _check_text(key, value)
        return Token(value)
    if isinstance(value, dict) and isinstance(content := value.get("content"), str):
        _check_text(key, content)
        flags = {name: flag for name, flag in value.items() if name not in ("content", "__type")}
        if unknown := [name for name, flag in flags.items() if name not in FLAGS or not isinstance(flag, bool)]:
            raise StartError(
                f"{FILE} says {shown(unknown[0])} of the token {shown(content)} in {shown(key)}, which has no such "
                "property"
            )
        return Token(content, flags)
    raise StartError(
        f"{FILE} has {shown(value)} in {shown(key)}; it must be a token: a text, or an object with content"
    )


def _added(config: Mapping[str, Any], files: Mapping[str, Path], special: set[str]) -> dict[int, Token]:
    if "added_tokens_decoder" in config:
        found = config["added_tokens_decoder"]
        _check("added_tokens_decoder", found, dict, "an object of tokens by their ids")
        pairs = [(token_id, _token("added_tokens_decoder", value)) for token_id, value in found.items()]
    else:
        by_content = _object(files, "added_tokens.json")
        pairs = [(token_id, Token(text, {"special": text in special})) for text, token_id in by_content.items()]
    found_by_id: dict[int, Token] = {}
    for written, token in pairs:
        token_id = _id(written)
        if token_id in found_by_id:
            raise StartError(
                f"the tokenizer's files give the id {token_id} to two tokens, {shown(found_by_id[token_id].content)} "
                f"and {shown(token.content)}"
            )
        found_by_id[token_id] = token
    return found_by_id


def _id(written: object) -> int:
    """Parse an id in canonical decimal form, of at most 32 bits."""
    digits = str(written) if isinstance(written, str | int) and not isinstance(written, bool) else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10 and str(int(digits)) == digits):
        raise StartError(f"the tokenizer's files have the added token id {shown(written)}, which is no token id")
    return int(digits)


def _chat_template(config: Mapping[str, Any], files: Mapping[str, Path]) -> ChatTemplateSource | None:
    """The model's chat template: chat_template.jinja before the config's, as in transformers; "default" of several."""
    if (name := "chat_template.jinja") in files:
        return ChatTemplateSource(_text(files[name]), name)
    name, found = FILE, config.get("chat_template")
    if found is None:
        name = "chat_template.json"
        found = _object(files, name).get("chat_template")
    if isinstance(found, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in found):
        names = [one["name"] for one in found]
        if wrong := [name for name in names if not isinstance(name, str) or names.count(name) > 1]:
            raise StartError(
                f"{FILE} has a chat_template named {shown(wrong[0])}; names must be texts, and each of one template"
            )
        found = {one["name"]: one["template"] for one in found}
    if isinstance(found, dict):
        if "default" not in found:
            log.warning("the model has no chat template named 'default', so it has no chats", names=list(found)[:20])
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise StartError(f"{name} has a chat_template that is neither a text nor a list of texts with names")
    if found is not None:
        _check_text("chat_template", found)
    return ChatTemplateSource(found, name) if found else None


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    _check(key, value or False, bool, "true or false")
    return bool(value)


def _check(key: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise StartError(f"{FILE} has {shown(value)} in {key}; it must be {expected}")


def _check_text(key: str, text: str) -> None:
    """Refuse lone surrogates, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StartError(f"{FILE} has half of a surrogate pair in {shown(key)}, {shown(text)}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StartError(f"{file.name} is not in UTF-8: {error.reason} at byte {error.start}") from None


def _object(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found = loads(_text(files[name]))
    except (ValueError, RecursionError) as error:
        raise StartError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise StartError(f"{name} is not a JSON object")
    return found


def check_ids(vocabulary: Mapping[str, int], num_tokens: int, whose: str) -> None:
    """Raise StartError for an id far beyond the number of tokens of a model or a file."""
    token = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if token is not None and vocabulary[token] >= (most := num_tokens + MAX_MORE):
        raise StartError(
            f"the tokenizer's files give the token {shown(token)} the id {vocabulary[token]}; {whose} has {num_tokens} "
            f"tokens, and ids must be below {most}"
        )
