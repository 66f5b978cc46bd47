"""Converts the keys of a GGUF file that describe the network to a config.json. Keys have the meanings and defaults of
llama.cpp's src/models/. A layer has a bias if the file has its tensor."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker_service.loading.gguf.keys import GgufKeys
from worker_service.loading.gguf.kinds import COUNT, FLAG, NOT_NEGATIVE, POSITIVE, SIZE
from worker_service.loading.gguf.rope import Divisors, read_rope_parameters
from worker_service.wording import shown

Json = dict[str, Any]

_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of Gemma's 27B models, whose attention llama.cpp scales by hidden size / heads."""
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def read_network(keys: GgufKeys, tensors: Collection[str], divisors: Divisors, vocabulary: int) -> Json:
    """Returns config.json without special tokens. `tensors`: names of all tensors. Raises ValueError."""
    if (network := ARCHITECTURES.get(keys.architecture)) is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"its architecture is {shown(keys.architecture)}; supported are {supported}")
    num_experts = keys.own("expert_count", SIZE) if network.model_type == "llama" else None
    if num_experts:
        network = _MIXTRAL
    said = keys.own("vocab_size", COUNT)
    if said not in (None, vocabulary):
        raise ValueError(f"its {keys.architecture}.vocab_size is {said}, and it has {vocabulary} tokens")
    hidden, heads = keys.need_own("embedding_length", COUNT), keys.of_all_layers("attention.head_count", COUNT)
    if heads is None:
        raise ValueError(f"it has no {keys.architecture}.attention.head_count")
    kv_heads = keys.of_all_layers("attention.head_count_kv", COUNT) or heads
    if heads % kv_heads:
        raise ValueError(
            f"its attention.head_count, {heads}, is no multiple of its attention.head_count_kv, {kv_heads}"
        )
    head_dim = keys.own("attention.key_length", COUNT) or hidden // heads
    value_length = keys.own("attention.value_length", COUNT)
    if value_length not in (None, head_dim):
        raise ValueError(f"its attention.value_length differs from its attention.key_length, {head_dim}")
    base: Json = {
        "model_type": network.model_type,
        "architectures": [network.class_name],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": keys.of_all_layers("feed_forward_length", SIZE),
        "num_hidden_layers": keys.need_own("block_count", COUNT),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.need_own("context_length", COUNT),
        "rms_norm_eps": keys.need_own("attention.layer_norm_rms_epsilon", NOT_NEGATIVE),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
    }
    rotary_dim = keys.own("rope.dimension_count", COUNT) or head_dim
    if rotary_dim != head_dim and keys.architecture != "phi3":
        raise ValueError(f"its rope.dimension_count is {rotary_dim}, and its heads have {head_dim} numbers")
    base["rope_parameters"] = read_rope_parameters(keys, divisors, rotary_dim, base["max_position_embeddings"])
    if rotary_dim != head_dim:
        base["rope_parameters"]["partial_rotary_factor"] = rotary_dim / head_dim
    for name, sources in network.biases.items():
        if any(tensor.endswith(tuple(f".{source}.bias" for source in sources)) for tensor in tensors):
            base[name] = True
    return base | network.read(keys, base)


def _mixtral(keys: GgufKeys, base: Json) -> Json:  # noqa: ARG001 (other networks' readers use `base`)
    count, chosen = _read_experts(keys)
    return {"num_local_experts": count, "num_experts_per_tok": chosen, "sliding_window": None}


def _qwen3_moe(keys: GgufKeys, base: Json) -> Json:
    (count, chosen), inner = _read_experts(keys), keys.own("expert_feed_forward_length", SIZE)
    if not inner and not base["intermediate_size"]:
        raise ValueError("it has no qwen3moe.expert_feed_forward_length")
    inner = inner or base["intermediate_size"] // chosen
    return {
        "intermediate_size": base["intermediate_size"] or inner,  # unused: all layers have experts
        "moe_intermediate_size": inner,
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _read_experts(keys: GgufKeys) -> tuple[int, int]:
    """Experts of a layer, and experts for each token."""
    count, chosen = keys.need_own("expert_count", COUNT), keys.need_own("expert_used_count", COUNT)
    if chosen > count:
        raise ValueError(f"its {keys.architecture}.expert_used_count is {chosen}, and its expert_count {count}")
    return count, chosen


def _smollm3(keys: GgufKeys, base: Json) -> Json:  # noqa: ARG001
    rotated = [int((number + 1) % 4 != 0) for number in range(base["num_hidden_layers"])]
    return {"no_rope_layers": rotated, "use_sliding_window": False}


def _phi3(keys: GgufKeys, base: Json) -> Json:
    """Unlike llama.cpp, this project applies the sliding window that the file states."""
    original = base["rope_parameters"].get("original_max_position_embeddings", base["max_position_embeddings"])
    window = keys.own("attention.sliding_window", SIZE) or None
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _gemma2(keys: GgufKeys, base: Json) -> Json:
    theta = base["rope_parameters"]["rope_theta"]
    if keys.own("rope.freq_base_swa", POSITIVE) not in (None, theta):
        raise ValueError(f"its gemma2.rope.freq_base_swa differs from its rope.freq_base, {theta}")
    return {
        "attn_logit_softcapping": keys.own("attn_logit_softcapping", POSITIVE) or 50.0,
        "final_logit_softcapping": keys.own("final_logit_softcapping", POSITIVE) or 30.0,
        "query_pre_attn_scalar": _attention_scalar(keys, base),
        **_windows(keys, base, keys.own("attention.sliding_window", COUNT) or 4096, 2),
        **_GELU,
    }


def _gemma3(keys: GgufKeys, base: Json) -> Json:
    far = base["rope_parameters"]
    if far["rope_type"] not in ("default", "linear"):
        raise ValueError(f"its positions are scaled as {far['rope_type']}, which is not supported for gemma3")
    near = keys.own("rope.freq_base_swa", POSITIVE) or 10_000.0
    return {
        "final_logit_softcapping": keys.own("final_logit_softcapping", NOT_NEGATIVE) or None,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": _attention_scalar(keys, base),
        "rope_parameters": {
            "full_attention": far,
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
        **_windows(keys, base, keys.own("attention.sliding_window", SIZE) or 0, 6),
        **_GELU,
    }


def _attention_scalar(keys: GgufKeys, base: Json) -> int:
    if base["num_hidden_layers"] == _27B[keys.architecture]:
        return int(base["hidden_size"]) // int(base["num_attention_heads"])
    return int(base["head_dim"])


def _windows(keys: GgufKeys, base: Json, window: int, period: int) -> Json:
    """The layers with a window: by default all but the last of each `period` layers."""
    number_of_layers, key = base["num_hidden_layers"], "attention.sliding_window_pattern"
    if keys.is_array(f"{keys.architecture}.{key}"):
        of_layers = [bool(value) for value in keys.numbers(f"{keys.architecture}.{key}", FLAG)]
        if len(of_layers) != number_of_layers:
            raise ValueError(f"its {key} has {len(of_layers)} entries, and it has {number_of_layers} layers")
    else:
        said = keys.own(key, SIZE)
        period = period if said is None else said
        of_layers = [period == 0 or number % period < period - 1 for number in range(number_of_layers)]
    kinds = ["sliding_attention" if slides and window else "full_attention" for slides in of_layers]
    return {"sliding_window": window or base["max_position_embeddings"], "layer_types": kinds}


@dataclass(frozen=True, slots=True)
class _Network:
    """A family of networks. biases: keys of config.json with the GGUF tensors of their biases; read: for other keys."""

    model_type: str
    class_name: str
    biases: Mapping[str, Sequence[str]]
    read: Callable[[GgufKeys, Json], Json]


_ATTENTION = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")}
_ALL = {**_ATTENTION, "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")}
_MIXTRAL = _Network("mixtral", "MixtralForCausalLM", {}, _mixtral)
"""Networks of the architecture "llama" with experts."""
ARCHITECTURES = {
    "gemma": _Network("gemma", "GemmaForCausalLM", _ATTENTION, lambda *_: _GELU),
    "gemma2": _Network("gemma2", "Gemma2ForCausalLM", _ATTENTION, _gemma2),
    "gemma3": _Network("gemma3_text", "Gemma3ForCausalLM", _ATTENTION, _gemma3),
    "llama": _Network("llama", "LlamaForCausalLM", _ALL, lambda *_: {}),
    "phi3": _Network("phi3", "Phi3ForCausalLM", {}, _phi3),
    "qwen2": _Network("qwen2", "Qwen2ForCausalLM", {}, lambda *_: {"use_sliding_window": False}),
    "qwen3": _Network("qwen3", "Qwen3ForCausalLM", _ATTENTION, lambda *_: {"use_sliding_window": False}),
    "qwen3moe": _Network("qwen3_moe", "Qwen3MoeForCausalLM", _ATTENTION, _qwen3_moe),
    "smollm3": _Network("smollm3", "SmolLM3ForCausalLM", _ALL, _smollm3),
}
"""Networks by general.architecture. "llama" includes Mistral, Mixtral and SmolLM2; qwen2 always has biases."""
