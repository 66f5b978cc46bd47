"""Token ids are those of tokenizer.json, whatever kind of tokenizer or model the other files name."""

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from scheduler_service.frontend.text.tokenization import Tokenizer
from worker_service.loading.tokenizer_files import vocabulary

CORPUS = [
    "hello world, how are you? I'm fine: it's 2024, and 1234567 tokens aren't 100000.",
    "def f(n):\n    return n\n\n  x += 1;\tHELLO World",
    "e\u0301 äöü straße ﬁne Ａ 日本語の文 привет мир",
]
SPECIAL = ["<unk>", "<s>", "</s>", "[CLS]", "[SEP]"]
TEXTS = [
    *CORPUS,
    *(" hello", "  hello  world ", "\n\n\thello", "hello   ", "", " ", "\u2581hello\u2581", "Hello WORLD"),
    *(
        "😀☃ never seen: ﷺ \u0000\u200b",
        "a<s>b</s> <unk>c",
        "a <tool> b<tool>c",
        "x<word>y <word> z",
        " <strip> a",
        "ＴＯＯＬ<ＴＯＯＬ>",
    ),
]
"""Leading and trailing spaces, bytes that no token has, and added tokens inside and between words."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")


def bytes_split_by(pattern: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return trained(backend, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def sentence_piece(normalizer: normalizers.Normalizer, decoder: list[decoders.Decoder]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *decoder]
    )
    return trained(backend, trainers.BpeTrainer, others=[f"<0x{byte:02X}>" for byte in range(256)])


def metaspace_of_bytes() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return trained(backend, trainers.BpeTrainer, others=[f"<0x{byte:02X}>" for byte in range(256)])


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return trained(backend, trainers.UnigramTrainer, unk_token="<unk>")


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend = trained(backend, trainers.WordPieceTrainer)
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 3), ("[SEP]", 4)]
    )
    return backend


def word_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    return trained(backend, trainers.WordLevelTrainer)


def words_round_bytes() -> tokenizers.Tokenizer:
    """A byte-level one with a normalizer, a prefix space and tokens of its own round a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("\u2581")])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    backend = trained(backend, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1", [("<s>", 1), ("</s>", 2)]),
        ]
    )
    return backend


def trained(
    backend: tokenizers.Tokenizer, trainer: Callable[..., object], others: list[str] | None = None, **options: object
) -> tokenizers.Tokenizer:
    """With added tokens of every kind."""
    backend.train_from_iterator(
        CORPUS * 9,
        trainer(vocab_size=600, special_tokens=[*SPECIAL, *(others or ())], show_progress=False, **options),
    )
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<TOOL>", normalized=True)])
    backend.add_tokens([AddedToken("<word>", single_word=True), "  "])
    backend.add_special_tokens([AddedToken("<strip>", lstrip=True, rstrip=True)])
    return backend


def prepended() -> tokenizers.Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return sentence_piece(normalizer, [decoders.Strip(" ", 1, 0)])


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes split as GPT-2 has it": lambda: bytes_split_by(GPT2),
    "bytes split as Llama 3 has it": lambda: bytes_split_by(LLAMA3),
    "bytes split as Qwen has it": lambda: bytes_split_by(QWEN),
    "SentencePiece with a space before a text": prepended,
    "SentencePiece without": lambda: sentence_piece(normalizers.Replace(" ", "\u2581"), []),
    "Metaspace with bytes": metaspace_of_bytes,
    "Unigram": unigram,
    "WordPiece": word_piece,
    "WordLevel": word_level,
    "bytes with a template": words_round_bytes,
}
CLASSES = [
    *(None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer"),
    *("Qwen2Tokenizer", "GemmaTokenizerFast", "T5Tokenizer", "BertTokenizer", "CodeLlamaTokenizer", "NoSuchTokenizer"),
]
MODEL_TYPES = [
    *("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "mixtral", "phi3", "gpt2", "gpt_neox"),
    *("opt", "cohere", "granite", "olmo2", "starcoder2", "bert", "xlm-roberta", "t5", "whisper"),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_ids_and_text_are_those_of_the_file_whatever_it_is_called(kind: str, tmp_path: Path) -> None:
    right = KINDS[kind]()
    right.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary([tmp_path / "tokenizer.json"]) == right.get_vocab(with_added_tokens=True)
    right.encode_special_tokens = False
    as_text = tokenizers.Tokenizer.from_str(right.to_str())
    as_text.encode_special_tokens = True
    ids = {text: (right.encode(text).ids, as_text.encode(text).ids) for text in TEXTS}
    shown = {
        text: (right.decode(ids[text][0]), right.decode(ids[text][0], skip_special_tokens=False)) for text in TEXTS
    }
    for name, model_type in zip(cycle(CLASSES), MODEL_TYPES, strict=False):
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        config |= {} if name is None else {"tokenizer_class": name}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        ours = Tokenizer(tmp_path)
        for text in TEXTS:
            spelled = await ours.encode(text, parse_special_tokens=True)
            assert (spelled, await ours.encode(text)) == ids[text], (name, model_type, text)
            for skip, expected in zip((True, False), shown[text], strict=True):
                found = await ours.decode(spelled, skip_special_tokens=skip)
                assert found == expected, (name, model_type, text)
