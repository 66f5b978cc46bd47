"""Pre-tokenizers: regular expressions that split a text before its bytes are merged to tokens. The expressions are from
llama.cpp's src/llama-vocab.cpp. Where llama.cpp approximates a model's expression because of its regex engine, this
file has the model's own, which llama.cpp quotes."""

# ruff: noqa: RUF001 (the ambiguous characters are intended: they belong to scripts that the patterns match)

from dataclasses import dataclass

from worker_service.wording import shown

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED = _PUNCTUATION + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_CHINESE_OR_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_CHINESE_OR_KOREAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_WORDS_OF_MANY_LANGUAGES = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns`: applied in order to the pieces of the pattern before. `whole_words`: pieces in the vocabulary are not
    merged. `adds_bos`: default for the BOS token before a text."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_KINDS = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    PreTokenizer((_GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    PreTokenizer((r"\p{N}", _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    PreTokenizer((_LLAMA3,), True, True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizer((_WORDS + r"\p{N}" + _REST,)): (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"
    ),
    PreTokenizer((f"{_CASED[0]}|{_CASED[1]}|" + r"\p{N}" + _CASED_REST,), True, True): "tekken",
    PreTokenizer(
        (rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _CASED_REST,)
    ): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_OR_KOREAN, r"\p{N}")): "deepseek-coder",
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _CHINESE_OR_KOREAN,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    PreTokenizer((r"\p{N}{1,3}", _CHINESE_OR_KANA, _MARKED + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")): (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4"
    ),
    PreTokenizer((r"\p{N}{1,3}", _CHINESE_OR_KANA, _MARKED + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")): "spark2_5",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    PreTokenizer(
        (
            _WORDS
            + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s",
        )
    ): "jais-2",
    PreTokenizer(
        (
            _CONTRACTIONS
            + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ): "qwen35",
    PreTokenizer((r"\p{N}{1,3}", _WORDS + r"\p{N}+" + _REST), whole_words=True): "minicpm5",
    PreTokenizer((_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)): "seed-coder",
    PreTokenizer((_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)): (
        "bailingmoe bailingmoe2 llada-moe"
    ),
    PreTokenizer(
        (
            _CONTRACTIONS
            + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            + r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): "exaone-moe",
    PreTokenizer((r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,)): "ufakzeka",
    PreTokenizer((r"[^\n]+|[\n]+", _WORDS + r"\p{N}" + _REST)): "laguna",
    PreTokenizer((_WORDS_OF_MANY_LANGUAGES,)): "poro-chat bloom gpt3-finnish",
    PreTokenizer((_WORDS_OF_MANY_LANGUAGES, r"\p{N}")): "viking",
    PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ): "chameleon",
    PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): "superbpe",
}
_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """name: value of tokenizer.ggml.pre. Raises ValueError if unknown."""
    if name not in _BY_NAME:
        raise ValueError(f"its tokenizer.ggml.pre is {shown(name)}; supported are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]
