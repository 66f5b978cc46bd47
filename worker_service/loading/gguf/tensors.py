"""Maps each tensor of a Hugging Face checkpoint to the GGUF tensor that contains it. llama.cpp's converter permutes
rows of Llama's query and key projections, and adds 1 to Gemma's norms; a `Target` tells how to undo both. If a layer
has some biases only, the missing ones are zeros."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker_service.loading.gguf.header import GgufTensor
from worker_service.wording import named, shown

_PERMUTED = ("llama", "mixtral", "smollm3")
"""Families whose rotary pairs are neighbours in llama.cpp, so that rows are permuted."""
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
"""Modules in a checkpoint by family: router, experts, and an expert's gate, up and down projections."""


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the checkpoint, and its place in the GGUF file.

        `source`      name of the GGUF tensor; None for zeros.
        `first_row`   first row in the GGUF tensor, which may stack several experts.
        `heads`       heads with permuted rows; 0 without permutation.
        `added`       number that llama.cpp's converter added to all values.

    A bias or a norm has one row.
    """

    shape: tuple[int, ...]
    source: str | None
    first_row: int = 0
    heads: int = 0
    added: float = 0.0


def map_tensors(config: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Target]:
    """The checkpoint's tensors by name. Raises ValueError if the GGUF tensors do not match config.json."""
    return dict(_map_all(config, tensors))


def _map_all(config: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, Target]]:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    family = config["model_type"]
    added = float(family.startswith("gemma"))
    found = _Finder(tensors)
    yield "model.embed_tokens.weight", found.target("token_embd.weight", (vocabulary, hidden))
    yield "model.norm.weight", found.target("output_norm.weight", (hidden,), added=added)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", found.target("output.weight", (vocabulary, hidden))
    for number in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{number}", f"blk.{number}"
        for name, source in _norms(family):
            size = config["head_dim"] if name.startswith("self_attn") else hidden
            yield f"{ours}.{name}.weight", found.target(f"{theirs}.{source}.weight", (size,), added=added)
        for name, source, shape, biased, heads in _projections(config):
            target = found.target(f"{theirs}.{source}.weight", shape, heads=heads)
            yield f"{ours}.{name}.weight", target
            if biased:
                yield f"{ours}.{name}.bias", found.bias(f"{theirs}.{source}.bias", shape[:1], heads)
        if family in _EXPERTS:
            for name, target in _experts(config, found, theirs):
                yield f"{ours}.{name}.weight", target


def _norms(family: str) -> Iterator[tuple[str, str]]:
    yield "input_layernorm", "attn_norm"
    if family in ("gemma2", "gemma3_text"):
        yield "post_attention_layernorm", "post_attention_norm"
        yield "pre_feedforward_layernorm", "ffn_norm"
        yield "post_feedforward_layernorm", "post_ffw_norm"
    else:
        yield "post_attention_layernorm", "ffn_norm"
    if family in ("gemma3_text", "qwen3", "qwen3_moe"):
        yield "self_attn.q_norm", "attn_q_norm"
        yield "self_attn.k_norm", "attn_k_norm"


def _projections(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, int], bool, int]]:
    """Yield name in the checkpoint, name in the GGUF file, shape, whether biased, heads with permuted rows."""
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key = heads * config["head_dim"], kv_heads * config["head_dim"]
    out_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if family == "phi3":
        yield "self_attn.qkv_proj", "attn_qkv", (query + 2 * key, hidden), False, 0
    else:
        bias = out_bias or family == "qwen2"
        permuted = family in _PERMUTED
        yield "self_attn.q_proj", "attn_q", (query, hidden), bias, heads if permuted else 0
        yield "self_attn.k_proj", "attn_k", (key, hidden), bias, kv_heads if permuted else 0
        yield "self_attn.v_proj", "attn_v", (key, hidden), bias, 0
    yield "self_attn.o_proj", "attn_output", (hidden, query), out_bias, 0
    if family in _EXPERTS:
        return
    if not inner:
        raise ValueError("it has no feed_forward_length")
    if family == "phi3":
        yield "mlp.gate_up_proj", "ffn_up", (2 * inner, hidden), False, 0
    else:
        yield "mlp.gate_proj", "ffn_gate", (inner, hidden), mlp_bias, 0
        yield "mlp.up_proj", "ffn_up", (inner, hidden), mlp_bias, 0
    yield "mlp.down_proj", "ffn_down", (hidden, inner), mlp_bias, 0


def _experts(config: Mapping[str, Any], found: "_Finder", theirs: str) -> Iterator[tuple[str, Target]]:
    """Yield a layer's router and experts. Older GGUF files have one tensor per expert, newer ones a stack."""
    count = config.get("num_experts") or config["num_local_experts"]
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    if not inner:
        raise ValueError("it has no feed_forward_length")
    router, experts, *names = _EXPERTS[config["model_type"]]
    yield router, found.target(f"{theirs}.ffn_gate_inp.weight", (count, hidden))
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for name, (source, shape) in zip(names, shapes.items(), strict=True):
        stacked = f"{theirs}.ffn_{source}_exps.weight"
        for number in range(count):
            if found.has(f"{theirs}.ffn_{source}.{number}.weight"):
                target = found.target(f"{theirs}.ffn_{source}.{number}.weight", shape)
            else:
                found.target(stacked, (count, *shape))
                target = Target(shape, stacked, first_row=number * shape[0])
            yield f"{experts}.{number}.{name}", target


class _Finder:
    def __init__(self, tensors: Mapping[str, GgufTensor]) -> None:
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def target(self, name: str, shape: tuple[int, ...], heads: int = 0, added: float = 0.0) -> Target:
        """Raises ValueError if the tensor is missing or has another shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"it has no tensor {name}")
        if tensor.shape[::-1] != shape:
            raise ValueError(
                f"its tensor {named(name)} is {shown(list(tensor.shape[::-1]))} where its sizes ask for {list(shape)}"
            )
        if heads and shape[0] // heads % 2:
            raise ValueError(f"its heads have {shape[0] // heads} numbers; rotary embeddings need an even number")
        return Target(shape, name, heads=heads, added=added)

    def bias(self, name: str, shape: tuple[int, ...], heads: int) -> Target:
        return self.target(name, shape, heads) if self.has(name) else Target(shape, None)
