"""Small files with llama.cpp's log-probabilities and tokens, each for something that a converter may overlook.
ask_llama_cpp.py records them.
"""

from pathlib import Path
from typing import Any

import numpy as np
from small_gguf import HEAD, HEADS, HIDDEN, INNER, KV_HEADS, NUM_TOKENS, number_of_layers, write_gguf

PROMPT = list(range(3, 27))
_DRAW = np.random.default_rng(1)


def _draw(*shape: int) -> Any:
    return (_DRAW.integers(-127, 128, shape) / 128).astype(np.float32)


def _biases(architecture: str, sizes: dict[str, int]) -> dict[str, Any]:
    layers = range(number_of_layers(architecture))
    return {f"blk.{layer}.{name}.bias": _draw(size) for layer in layers for name, size in sizes.items()}


_QUERY, _KEY = HEADS * HEAD, KV_HEADS * HEAD
_QKV = {"attn_q": _QUERY, "attn_k": _KEY, "attn_v": _KEY}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def _case(architecture: str = "llama", own: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    keys = {f"{architecture}.{key}": value for key, value in (own or {}).items()}
    return {"architecture": architecture, "keys": keys, **options}


CASES: dict[str, dict[str, Any]] = {
    "llama": _case(),
    "llama without a key_length": _case(own={"attention.key_length": None, "attention.value_length": None}),
    "llama with wide heads": _case(head=16),
    "rope_freqs of Llama 3.1": _case(more={"rope_freqs.weight": [1, 2, 4, 8]}),
    "rope_freqs with a factor": _case(own={"rope.scaling.factor": 2.0}, more={"rope_freqs.weight": [1, 2, 4, 8]}),
    "linear scaling": _case(own={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "a factor of 0 beside its old name": _case(own={"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}),
    "linear scaling by its old name": _case(own={"rope.scale_linear": 4.0}),
    "a factor without a type": _case(own={"rope.scaling.factor": 4.0}),
    "a factor of no scaling": _case(own={"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "linear scaling with an attention factor": _case(own={"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5}),
    "yarn": _case(own=_YARN),
    "yarn with an original length of 0": _case(own=_YARN | {"rope.scaling.original_context_length": 0}),
    "yarn with an attention factor": _case(own=_YARN | {"rope.scaling.attn_factor": 1.5}),
    "another base and epsilon": _case(own={"rope.freq_base": 500.0, "attention.layer_norm_rms_epsilon": 0.25}),
    "biases of query, key and value": _case(more=_biases("llama", _QKV)),
    "a bias of the output alone": _case(more=_biases("llama", {"attn_output": HIDDEN})),
    "biases of the feed-forward network": _case(
        more=_biases("llama", {"ffn_gate": INNER, "ffn_up": INNER, "ffn_down": HIDDEN})
    ),
    "a head of its own": _case(change={"output": (NUM_TOKENS, HIDDEN)}),
    "mixtral": _case(own=_EXPERTS, experts=True),
    "qwen2": _case("qwen2", more=_biases("qwen2", _QKV)),
    "qwen2 with yarn": _case("qwen2", _YARN, more=_biases("qwen2", _QKV)),
    "qwen3": _case("qwen3"),
    "qwen3moe": _case("qwen3moe", {**_EXPERTS, "expert_feed_forward_length": INNER}, experts=True),
    "smollm3": _case("smollm3"),
    "phi3": _case("phi3"),
    "phi3 with part of each head turned": _case("phi3", {"rope.dimension_count": 4}),
    "phi3 with two sets of factors": _case(
        "phi3",
        {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.25},
        more={"rope_factors_long.weight": [4, 8, 16, 32], "rope_factors_short.weight": [1, 1.5, 2, 3]},
    ),
    "gemma": _case("gemma"),
    "gemma2": _case("gemma2", {"attention.sliding_window": 4}),
    "gemma2 with its caps": _case(
        "gemma2",
        {"attention.sliding_window": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": _case("gemma3", {"attention.sliding_window": 4, "rope.freq_base": 1e6}),
    "gemma3 with another pattern": _case(
        "gemma3", {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6}
    ),
    "gemma3 with linear scaling": _case(
        "gemma3",
        {"attention.sliding_window": 4, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma3 with a base for windows": _case("gemma3", {"attention.sliding_window": 4, "rope.freq_base_swa": 100.0}),
    "gemma3 without windows": _case("gemma3", {"attention.sliding_window": 0}),
    "gemma3 of 27 billion": _case("gemma3", {"attention.sliding_window": 4}, layers=62, head=16),
    "gemma3 with a cap of 0": _case("gemma3", {"attention.sliding_window": 4, "final_logit_softcapping": 0.0}),
    "gemma3 with a cap": _case("gemma3", {"attention.sliding_window": 4, "final_logit_softcapping": 3.0}),
}


LETTERS = "aB1 .\n's\t-ú一あ가，"
TEXTS = [
    "a", " a", "aa BB", "  a  B", "11 111", "1234", "a1.a", "B's a'S", "..\n\n a", "aB.\n1 ", "a\n  \n B",
    "Ba aB BB'sa", "", " ", "<|end|>a", "é.1", "a <tool> B", "<s>a", "aaaaa", "<tool>  a",
    "1111111 11.1", "a一aああ 가가가1a", "a，一。 ，B", "\t\ta\n\n\n  a", "-a -a--B .a", "aú úBa ú1ú",
    "a111\n111.111a", "a'sB  ",
    "a u\u0301a\u0301 B", "a B a\r\n\r\nB.\n", "111\n\n\ta. \n  \n\n\nB", "    a     B        1",
]  # fmt: skip
PRE_TOKENIZERS = (
    "default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "deepseek-coder", "deepseek-llm",
    "deepseek-v3", "spark2_5", "falcon", "jais-2", "qwen35", "minicpm5", "seed-coder", "bailingmoe",
    "exaone-moe", "ufakzeka", "laguna", "bloom", "viking", "chameleon", "superbpe",
)  # fmt: skip


def _byte_level(pre: str) -> dict[str, Any]:
    """All bytes, and all pairs of some letters, which show where a text is cut."""
    printable = (*range(33, 127), *range(161, 173), *range(174, 256))
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    spelled = sorted({spelling[byte] for byte in LETTERS.encode()})
    pairs = [(first, second) for first in spelled for second in spelled]
    tokens = [*spelling.values(), *(first + second for first, second in pairs), "<|end|>", "<tool>"]
    assert len({*tokens}) == len(tokens)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 4],
        "merges": [f"{first} {second}" for first, second in pairs],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 2,
    }


def _sentence_piece(**more: Any) -> dict[str, Any]:
    words = ["▁", "a", "B", "1", ".", "s", "▁a", "aa", "▁B", "BB", "▁BB", "aaa", "▁▁", "aB", "11", "▁aaa", "1."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tool>", "  ", "<|end|>"]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [float(-number) for number in range(len(words))] + [-1000.0] * 3,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [4, 4, 3],
        **more,
    }


TOKENIZERS: dict[str, dict[str, Any]] = {
    **{f"gpt2, {pre}": _byte_level(pre) for pre in PRE_TOKENIZERS},
    "llama": _sentence_piece(),
    "llama without a space before": _sentence_piece(add_space_prefix=False),
}
_OF_A_TOKENIZER = ("pre", "merges", "bos_token_id", "eos_token_id")


def write_case(name: str, path: Path) -> None:
    write_gguf(path, **CASES[name])


def write_tokenizer(name: str, path: Path, **keys: Any) -> None:
    own = dict.fromkeys(_OF_A_TOKENIZER) | TOKENIZERS[name] | keys
    count = len(own["tokens"])
    all_keys = {f"tokenizer.ggml.{key}": value for key, value in own.items()} | {"llama.vocab_size": count}
    write_gguf(path, change={"token_embd": (count, HIDDEN)}, keys=all_keys)
