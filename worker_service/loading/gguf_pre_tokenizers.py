"""How texts are cut before their bytes are merged, by the name that a GGUF file has for it in tokenizer.ggml.pre.

The patterns are those of llama.cpp's src/llama-vocab.cpp. Where it has only approximated a pattern, because its own
engine has no such classes, this is the one that the model was trained with, which stands beside it there.
"""

from dataclasses import dataclass

from worker_service.wording import shown

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns`: each splits what the patterns before it left. `whole_words`: whether a piece that is in the
    vocabulary is that token, without merges. `adds_bos`: whether texts begin with the BOS token if no key says so.
    """

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
    ): "gpt-4o llama4 kanana2 talkie",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")): "deepseek-coder",
}
_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Raises ValueError for a name that is not known."""
    if name not in _BY_NAME:
        raise ValueError(f"its tokenizer.ggml.pre is {shown(name)}; supported are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]
