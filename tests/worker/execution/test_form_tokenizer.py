"""A form whose text spells a special token is written with ordinary tokens, and the output has its form."""

import json
import re
from collections.abc import Callable

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from worker_helpers import mask_of

from worker_service.execution.sampling.form_process import Follower, Work
from worker_service.execution.sampling.form_tokenizer import form_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>", "[INST]", "<｜end▁of▁text｜>"]
NOT_SPECIAL = ["<tool_call>", "</think>", "<0>"]
"""Added tokens that are text, and that llguidance by itself takes for special ones, by their brackets."""
ORDINARY = ["    ", "Ahoi"]
"""Other added tokens that are text."""
SPARE = 7
"""Token ids behind the tokenizer's last, as a network may have."""
CHARACTERS = [chr(code) for code in range(33, 127)]


def byte_level() -> Tokenizer:
    """As GPT-2's kin have it: special tokens stand in the vocabulary, others are added behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL[:4], *alphabet, "<|", "|>", "im", "<|im"]
    merges = [("<", "|"), ("|", ">"), ("i", "m"), ("<|", "im")]
    tokenizer = Tokenizer(models.BPE({word: token_id for token_id, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it."""
    words = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *CHARACTERS, "<s"]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("<", "s")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram() -> Tokenizer:
    """Special tokens are pieces like any other: the model itself makes </s> of its four characters."""
    words = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *CHARACTERS]
    tokenizer = Tokenizer(models.Unigram([(word, -5.0) for word in words], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, unigram])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    make: Callable[[], Tokenizer] = request.param
    tokenizer = make()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*NOT_SPECIAL, *ORDINARY]])
    return tokenizer


@pytest.fixture(scope="module")
def size(tokenizer: Tokenizer) -> int:
    return int(tokenizer.get_vocab_size()) + SPARE


@pytest.fixture(scope="module")
def ends(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>")]


@pytest.fixture(scope="module")
def follower(tokenizer: Tokenizer, size: int, ends: list[int]) -> Follower:
    return Follower(form_tokenizer(tokenizer.to_str(), size, ends), size)


def forms(text: str) -> list[tuple[str, str]]:
    """Grammars that only one text has, with it."""
    literal = json.dumps(text, ensure_ascii=False)
    return [
        (LLMatcher.grammar_from_lark(f"start: {literal}"), text),
        (LLMatcher.grammar_from_lark(f'start: "x" /[yz]/ {literal} | "yet " {literal}'), f"xz{text}"),
        (LLMatcher.grammar_from_regex(re.escape(text).replace("/", "\\/") + "{1}"), text),
        (LLMatcher.grammar_from_json_schema({"enum": [text]}), literal),
        (LLMatcher.grammar_from_json_schema({"type": "object", "properties": {text: {"const": text}},
                                             "required": [text], "additionalProperties": False}),
         f"{{{literal}:{literal}}}"),
    ]  # fmt: skip


def written(follower: Follower, grammar: str, ends: list[int], text: str) -> list[int]:
    """Tokens of an output that has this text: of those that may follow, the longest that goes on with it."""
    read: list[int] = []
    token_ids: list[int] = []
    rest = text.encode()
    tokens = follower._tokenizer
    try:
        while True:
            mask = mask_of(follower, Work(0, "" if token_ids else grammar, read, samples=True))
            may = [number for number in range(8 * len(mask)) if mask[number // 8] >> number % 8 & 1]
            if not rest:
                assert set(may) == set(ends)
                return token_ids
            fitting = [token_id for token_id in may if rest.startswith(tokens.decode_bytes([token_id]))]
            assert fitting, (text, token_ids, rest)
            read = [max(fitting, key=lambda token_id: len(tokens.decode_bytes([token_id])))]
            token_ids += read
            rest = rest[len(tokens.decode_bytes(read)) :]
    finally:
        follower.forget(0)


@pytest.mark.parametrize("token", [*SPECIAL, *NOT_SPECIAL, *ORDINARY])
@pytest.mark.parametrize("around", ["{}", "a{}b", "{0}{0}", " x {} "])
def test_text_that_spells_a_token_is_written_with_ordinary_ones(
    follower: Follower, tokenizer: Tokenizer, ends: list[int], token: str, around: str
) -> None:
    not_text = {tokenizer.token_to_id(special) for special in SPECIAL}
    for grammar, text in forms(around.format(token)):
        token_ids = written(follower, grammar, ends, text)
        assert not_text.isdisjoint(token_ids)
        assert tokenizer.decode([*token_ids, ends[0]], skip_special_tokens=True) == text


def test_a_grammar_has_special_tokens_by_their_names(follower: Follower, tokenizer: Tokenizer, ends: list[int]) -> None:
    for token in ("<|im_end|>", "<s>"):
        grammar = LLMatcher.grammar_from_lark(f'start: {token} "a"')
        mask = mask_of(follower, Work(1, grammar, [], samples=True))
        assert [number for number in range(8 * len(mask)) if mask[number // 8] >> number % 8 & 1] == [
            tokenizer.token_to_id(token)
        ]
        follower.forget(1)


def test_every_token_has_the_bytes_that_llguidance_reads_of_the_file(
    tokenizer: Tokenizer, size: int, ends: list[int]
) -> None:
    ours = form_tokenizer(tokenizer.to_str(), size, ends)
    theirs = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
    assert ours.eos_tokens == theirs.eos_tokens == ends
    assert ours.vocab_size == theirs.vocab_size == size
    for token_id in range(size):
        assert ours.decode_bytes([token_id]) == theirs.decode_bytes([token_id])
        is_text = tokenizer.id_to_token(token_id) in NOT_SPECIAL
        assert ours.is_special_token(token_id) == (theirs.is_special_token(token_id) and not is_text)


def test_a_token_that_the_file_does_not_call_special_is_text(follower: Follower, tokenizer: Tokenizer) -> None:
    """So a grammar of tool calls allows the token with which the model begins a call."""
    for token in NOT_SPECIAL:
        mask = mask_of(follower, Work(2, LLMatcher.grammar_from_lark(f'start: "{token}" /[ab]/'), [], samples=True))
        number = tokenizer.token_to_id(token)
        assert mask[number // 8] >> number % 8 & 1
        follower.forget(2)
