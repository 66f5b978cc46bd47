"""Tokenizers of every shape, each with a thousand special tokens and a chat template, and their worst texts."""

from collections.abc import Callable
from pathlib import Path

import tokenizers
from tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [*SPECIAL_TOKENS, "<unk>", *(f"<|reserved_special_token_{number}|>" for number in range(984))]


def byte_level() -> tokenizers.Tokenizer:
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefgh<>|_"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def sentence_piece_after_nfkc() -> tokenizers.Tokenizer:
    backend = sentence_piece()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), backend.normalizer])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    pieces = [(token, 0.0) for token in SPECIAL] + [(piece, -float(i)) for i, piece in enumerate("\u2581abcdefgh<>|_")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=SPECIAL.index("<unk>")))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece() -> tokenizers.Tokenizer:
    letters = "abcdefgh<>|_"
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


SHAPES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level BPE": byte_level,
    "SentencePiece BPE": sentence_piece,
    "SentencePiece BPE after NFKC": sentence_piece_after_nfkc,
    "Unigram with Metaspace": metaspace,
    "WordPiece": word_piece,
}


def write(shape: str, directory: Path) -> int:
    """Returns the number of tokens."""
    backend = SHAPES[shape]()
    backend.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return backend.get_vocab_size()


def worst_texts(num_bytes: int) -> dict[str, str]:
    """Texts of `num_bytes`."""
    units = {
        "beginnings of special tokens": "<",
        "nearly whole special tokens": "<|reserved_special_token_98<",
        "special tokens": "<|im_end|>",
        "long special tokens": SPECIAL[-1],
        "marks of nothing": "\ue000",
        "spaces": " ",
        "one word": "a",
        "words": "abc de ",
        "emoji": "\U0001f600",
        "what normalizers make long": "\ufdfa",
    }
    return {name: unit * (num_bytes // len(unit.encode())) for name, unit in units.items()}
