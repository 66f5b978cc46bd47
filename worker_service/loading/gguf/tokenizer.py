"""Converts the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json. Tokens are those of llama.cpp's
src/llama-vocab.cpp, but for two cases. The text of a control token in a user's input stays text. A text such as </s>,
also an HTML tag, ends an output only if the file marks a control token."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from worker_service.loading.gguf.keys import GgufKeys
from worker_service.loading.gguf.kinds import FLAG, NUMBER, TEXT, WHOLE, Kind
from worker_service.loading.gguf.pre_tokenizers import find_pre_tokenizer
from worker_service.wording import reason, shown

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NO_TOKEN = 2**32 - 1
_SPACE = "▁"
_TOKEN_TYPE = Kind(int, "a type of tokens, from 0 to 6", 0, 6)

_MAX_TOKEN_BYTES = 1_024
"""Bytes of a token. Byte-level vocabularies have tokens of 128 spaces, in 2 bytes each."""
_MAX_VOCABULARY_BYTES = 1 << 23
"""Bytes of all tokens: 32 each for 262,144 tokens. With tokens of 1,024 bytes, finding mergeable pairs takes 7 s."""
_MAX_MERGE_BYTES = 1 << 27
"""Bytes of all pairs that a SentencePiece tokenizer may merge: 256 each for 524,288 pairs."""

_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",  # noqa: RUF001
})  # fmt: skip
"""Control tokens that end an output even without a key, because converters often omit the keys."""
_FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens that end an infilling, and any other output, by key. Without the key: the first text that is a control
token."""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of special tokens. `ends`: tokens that end an output, eos_token_id first."""

    bos: int | None
    pad: int | None
    ends: tuple[int, ...]


def convert_tokenizer(keys: GgufKeys, vocabulary: int, folder: Path) -> TokenIds:
    """`vocabulary`: number of tokens in the embedding weights. Raises ValueError."""
    kind = keys.need("tokenizer.ggml.model", TEXT)
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(keys.texts("tokenizer.ggml.tokens"))]
    if len(tokens) != vocabulary:
        raise ValueError(f"its tokenizer has {len(tokens)} tokens, and its embeddings {vocabulary}")
    _check_lengths(tokens)
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ValueError(
            f"its tokenizer has a token twice: {shown(next(t for n, t in enumerate(tokens) if ids[t] > n))}"
        )
    types = keys.numbers("tokenizer.ggml.token_type", _TOKEN_TYPE).tolist() or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"its tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    readers = {"llama": _sentence_piece, "gpt2": _byte_level}
    if kind not in readers:
        raise ValueError(f"its tokenizer.ggml.model is {shown(kind)}; supported are {', '.join(sorted(readers))}")
    special = _special_ids(keys, ids, 1 if kind == "llama" else None)
    ends = _ends(
        keys, ids, special, {token for token, of_token in zip(tokens, types, strict=True) if of_token == _CONTROL}
    )
    for end in ends:
        types[end] = _CONTROL
    vocab = _Vocabulary(tokens, ids, types)
    try:
        tokenizer, adds_bos = readers[kind](keys, vocab, special["unk"])
        _add_tokens(tokenizer, vocab, _strips_behind(keys))
    except ValueError:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"its tokenizer is not sound: {reason(error)}") from error
    added = keys.get("tokenizer.ggml.add_bos_token", FLAG)
    first = special["bos"] if (adds_bos if added is None else added) else None
    last = special["eos"] if keys.get("tokenizer.ggml.add_eos_token", FLAG) else None
    if (added and first is None) or (last is None and keys.get("tokenizer.ggml.add_eos_token", FLAG)):
        raise ValueError("its tokenizer adds a token at the beginning or the end of texts, but names none")
    _surround(tokenizer, tokens, first, last)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, number in special.items():
        if number is not None:
            config[f"{name}_token"] = tokens[number]
    if templates := _chat_templates(keys):
        config["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return TokenIds(special["bos"], special["pad"], ends)


def _check_lengths(tokens: Sequence[str]) -> None:
    """Refuse long tokens, whose conversion would take too much time."""
    lengths = [len(token.encode()) for token in tokens]
    if (longest := max(lengths, default=0)) > _MAX_TOKEN_BYTES:
        token = tokens[lengths.index(longest)]
        raise ValueError(
            f"its tokenizer.ggml.tokens has the token {shown(token)} of {longest} bytes; at most {_MAX_TOKEN_BYTES} "
            "are supported"
        )
    if (total := sum(lengths)) > _MAX_VOCABULARY_BYTES:
        raise ValueError(
            f"its tokenizer.ggml.tokens have {total} bytes together; at most {_MAX_VOCABULARY_BYTES} are supported"
        )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]


def _special_ids(keys: GgufKeys, ids: dict[str, int], first: int | None) -> dict[str, int | None]:
    """Ids by names in tokenizer_config.json. llama.cpp's defaults: bos `first`, eos `first` + 1, unk `first` - 1."""
    defaults = {} if first is None else {"bos": first, "eos": first + 1, "unk": first - 1}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    names |= {"mask": "mask", "cls": "cls"}
    found: dict[str, int | None] = {}
    for name, key in names.items():
        found[name] = _token_id(keys, key, ids)
        if found[name] is None and defaults.get(name, len(ids)) < len(ids):
            found[name] = defaults[name]
    return found


def _token_id(keys: GgufKeys, name: str, ids: dict[str, int]) -> int | None:
    number = keys.get(f"tokenizer.ggml.{name}_token_id", WHOLE)
    if number is None or number in (-1, _NO_TOKEN):
        return None
    if not 0 <= number < len(ids):
        raise ValueError(f"its tokenizer.ggml.{name}_token_id is {number}, and it has {len(ids)} tokens")
    return number


def _ends(keys: GgufKeys, ids: dict[str, int], special: dict[str, int | None], controls: set[str]) -> tuple[int, ...]:
    found = [special["eos"], _token_id(keys, "eot", ids), _token_id(keys, "eom", ids)]
    found += sorted(ids[text] for text in _ENDS & controls)
    for name, texts in _FIM_ENDS.items():
        said = _token_id(keys, name, ids)
        found.append(next((ids[text] for text in texts if text in controls), None) if said is None else said)
    return tuple(dict.fromkeys(number for number in found if number is not None))


def _sentence_piece(keys: GgufKeys, vocab: _Vocabulary, unknown: int | None) -> tuple[Tokenizer, bool]:
    """Builds a tokenizer that always merges the two neighbours with the highest score."""
    # Scores determine the merges; `pre` is for byte-level tokenizers.
    keys.leave("tokenizer.ggml.merges", "tokenizer.ggml.pre")
    scores = keys.numbers("tokenizer.ggml.scores", NUMBER)
    if len(scores) != len(vocab.tokens):
        raise ValueError(f"its tokenizer.ggml.scores has {len(scores)} entries for {len(vocab.tokens)} tokens")
    pieces = {
        token: -float(score)
        for token, score, kind in zip(vocab.tokens, scores, vocab.types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL)
    }
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab.ids,
            merges=_merges(pieces),
            unk_token=None if unknown is None else vocab.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    texts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.get("tokenizer.ggml.add_space_prefix", FLAG) is not False:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        texts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(texts)
    return tokenizer, True


def _merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of pieces that form another piece, highest score first. pieces: with negated scores."""
    found: list[tuple[float, int, tuple[str, str]]] = []
    num_bytes = 0
    for token, rank in pieces.items():
        merges = [
            (rank, -place, (token[:place], token[place:]))
            for place in range(1, len(token))
            if token[:place] in pieces and token[place:] in pieces
        ]
        num_bytes += len(merges) * len(token.encode())
        if num_bytes > _MAX_MERGE_BYTES:
            raise ValueError(
                f"the pairs of its tokenizer.ggml.tokens that form other tokens have more than {_MAX_MERGE_BYTES} "
                f"bytes, which is not supported"
            )
        found += merges
    found.sort(key=lambda merge: merge[:2])
    return [merge for _, _, merge in found]


def _byte_level(keys: GgufKeys, vocab: _Vocabulary, unknown: int | None) -> tuple[Tokenizer, bool]:
    keys.leave("tokenizer.ggml.scores")  # unused: the file lists its merges
    if keys.get("tokenizer.ggml.add_space_prefix", FLAG):
        raise ValueError("its tokenizer.ggml.add_space_prefix is true, which is not supported for the model gpt2")
    splits = find_pre_tokenizer(keys.get("tokenizer.ggml.pre", TEXT) or "default")
    merges: dict[tuple[str, str], None] = {}  # the first of equal pairs counts
    for merge in keys.texts("tokenizer.ggml.merges"):
        place = merge.find(" ", 1)
        if place < 0:
            raise ValueError(f"its tokenizer.ggml.merges has {shown(merge)}, which is no pair")
        merges[merge[:place], merge[place + 1 :]] = None
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab.ids,
            merges=list(merges),
            unk_token=None if unknown is None else vocab.tokens[unknown],
            ignore_merges=splits.whole_words,
        )
    )
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splits.adds_bos


def _strips_behind(keys: GgufKeys) -> bool:
    """Whether white space after control tokens is removed; as in llama.cpp, the model's name decides."""
    name = (keys.get("general.name", TEXT) or "").lower()
    return "phi-3" in name or "phi3" in name


def _add_tokens(tokenizer: Tokenizer, vocab: _Vocabulary, strips: bool) -> None:
    """Register control and user-defined tokens, which are found before the text is split."""
    special: list[AddedToken] = []
    others: list[AddedToken] = []
    for text, kind in zip(vocab.tokens, vocab.types, strict=True):
        rstrip = strips and text not in ("<unk>", "<s>", "<|endoftext|>")
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(text, normalized=False, special=True, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(text, normalized=False, special=False, rstrip=rstrip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)


def _surround(tokenizer: Tokenizer, tokens: list[str], first: int | None, last: int | None) -> None:
    around = {tokens[number]: number for number in (first, last) if number is not None}
    if not around:
        return
    before, behind = ([] if number is None else [tokens[number]] for number in (first, last))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        pair=[*before, "$A", *behind, *(f"{text}:1" for text in before), "$B:1", *(f"{text}:1" for text in behind)],
        special_tokens=list(around.items()),
    )


def _chat_templates(keys: GgufKeys) -> str | list[dict[str, str]] | None:
    default = keys.get("tokenizer.chat_template", TEXT)
    names = [*keys.texts("tokenizer.chat_templates"), *keys.names("tokenizer.chat_template.")]
    named = {name: keys.need(f"tokenizer.chat_template.{name}", TEXT) for name in names}
    if not named:
        return default
    if default is not None:
        named = {"default": default, **named}
    return [{"name": name, "template": template} for name, template in named.items()]
