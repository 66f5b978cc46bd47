"""A native family's config.json reads as transformers reads it, whatever it leaves out and however old it is."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.families import FAMILIES
from worker_service.models.decoders.states.families import FAMILIES_WITH_STATES
from worker_service.models.registry import read_config

SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 300,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "max_position_embeddings": 64,
}
MIXTURES = ("glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe")
UNKNOWN = {"mimo": "qwen2"}
"""Families that transformers does not know, each with one that it does, which they are like."""
# Every key of families with states is compared by `test_config_sweep`, too.
LATENTS = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "minicpm3", "mistral4", "youtu"}
"""Families with latent attention, whose every key `test_config_sweep` compares."""
WITH_TWO_SIZES = {"gemma4_text", "gemma4_unified_text"}
"""Families with heads of two sizes, whose every key `test_config_sweep` compares."""
WITH_SECTIONS = {"qwen2_vl_text", "qwen2_5_vl_text"}
"""Families whose sections must have as many pairs as a head."""
TIED_BY_THE_WHOLE = {"qwen3_vl_moe_text"}
"""Families whose files belong to a whole that decides whether embeddings and output head are tied."""
SECTIONS = {"rope_type": "default", "rope_theta": 77.0, "mrope_section": [1, 1, 0]}
ELSEWHERE = LATENTS | WITH_TWO_SIZES | WITH_SECTIONS | TIED_BY_THE_WHOLE | UNKNOWN.keys() | FAMILIES_WITH_STATES.keys()
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
FILES: list[dict[str, Any]] = [
    *({"model_type": family} for family in FAMILIES if family not in ELSEWHERE),
    *({"model_type": family, "rope_parameters": SECTIONS} for family in sorted(WITH_SECTIONS)),
    {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None},
    {"model_type": "gemma2", "query_pre_attn_scalar": 100, "attn_logit_softcapping": None, "sliding_window": 9},
    {
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "sliding_window": 9,
        "rope_local_base_freq": 99.0,
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
        },
    },
    {
        "model_type": "gpt_oss",
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
        "rope_theta": 999,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "initial_context_length": 16,
        "attention_bias": False,
        "sliding_window": 9,
    },
    {"model_type": "llama", "num_key_value_heads": None, "head_dim": None, "rope_theta": 500.0},
    {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "mixtral", "sliding_window": 9, "num_local_experts": 3, "num_experts_per_tok": 1},
    {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 7, "rope_scaling": None},
    {"model_type": "qwen2", **QWEN_WINDOWS},
    {"model_type": "qwen2", **QWEN_WINDOWS, "use_sliding_window": False},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0},
    {"model_type": "qwen3", **QWEN_WINDOWS, "tie_word_embeddings": True},
    {
        "model_type": "qwen3_moe",
        "use_sliding_window": True,
        "sliding_window": 9,
        "norm_topk_prob": True,
        "attention_bias": True,
    },
    {"model_type": "qwen3_moe", "num_local_experts": 12, "moe_intermediate_size": 44, "mlp_only_layers": [1, 4]},
    {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": None, "num_experts_per_tok": 3},
    {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2},
    {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1, 1, 0]},
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_reads_as_transformers_reads_it(file: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = AutoConfig.for_model(**SIZES | file)
    ours = read_config(SIZES | file)
    assert isinstance(ours, DecoderConfig)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == getattr(theirs, "tie_word_embeddings", False)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4)
    activation = getattr(theirs, "hidden_act", None) or theirs.hidden_activation
    assert ours.activation == activation.replace("gelu_pytorch_tanh", "gelu_tanh")
    is_gemma = file["model_type"].startswith("gemma")
    assert ours.norm_offset == is_gemma
    assert ours.embedding_scale == (16 if is_gemma else 1)
    assert ours.attention_scale == (getattr(theirs, "query_pre_attn_scalar", None) or ours.head_dim) ** -0.5
    assert ours.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    if file["model_type"] == "gemma2":  # no code of transformers reads Gemma 3's
        assert ours.attention_soft_cap == theirs.attn_logit_softcapping
    assert ours.out_bias == getattr(theirs, "attention_bias", False)
    assert ours.qkv_bias == getattr(theirs, "attention_bias", file["model_type"] in {"qwen2", *WITH_SECTIONS})
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)

    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 5)
    keys = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    windows = [getattr(theirs, keys[kind], None) if kind in keys else None for kind in kinds]
    assert [layer.window for layer in ours.layers] == windows
    assert [layer.chunked for layer in ours.layers] == ["chunked" in kind for kind in kinds]
    rotated = getattr(theirs, "no_rope_layers", [1] * 5)
    assert [layer.rope is not None for layer in ours.layers] == [bool(rotates) for rotates in rotated]
    for layer, kind in zip(ours.layers, kinds, strict=True):
        if layer.rope is not None:
            rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
            rotary_dim = int(ours.head_dim * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, rotary_dim, 2) / rotary_dim
            expected = 1.0 / rope["rope_theta"] ** exponents / rope.get("factor", 1.0)
            if rope["rope_type"] == "yarn":
                expected, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs)
                assert layer.rope.scale == scale
            torch.testing.assert_close(layer.rope.inverse_frequencies, expected)


@pytest.mark.parametrize("file", [file for file in FILES if file["model_type"] in MIXTURES], ids=str)
def test_experts_are_where_transformers_has_them_and_as_many(file: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoConfig.for_model(**SIZES | file)
    ours = read_config(SIZES | file)
    assert isinstance(ours, DecoderConfig)
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(theirs)
    assert [layer.mixture is not None for layer in ours.layers] == [
        hasattr(layer.mlp, "experts") for layer in network.model.layers
    ]
    mixtures = [layer.mlp for layer in network.model.layers if hasattr(layer.mlp, "experts")]
    mixture, router = ours.mixture, getattr(mixtures[0], "gate", None) or mixtures[0].router
    assert mixture is not None
    assert (mixture.num_experts, mixture.num_chosen) == (router.num_experts, router.top_k)
    assert mixture.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert mixture.renormalise == getattr(theirs, "norm_topk_prob", True)


@pytest.mark.parametrize(("family", "like"), UNKNOWN.items())
def test_a_file_of_a_family_that_transformers_does_not_know_reads_as_one_that_it_does(family: str, like: str) -> None:
    found, known = (read_config(SIZES | QWEN_WINDOWS | {"model_type": one}) for one in (family, like))
    assert replace(known, layers=found.layers) == found
    assert [layer.window for layer in found.layers] == [layer.window for layer in known.layers]


KIMI: dict[str, Any] = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
"""Keys as in the published file of Kimi K2."""


def test_kimi_k2_is_deepseek_v3() -> None:
    """The factor on the softmax's scale is the square of YaRN's, and that on cosines cancels out."""
    found, known = (read_config(KIMI | {"model_type": family}) for family in ("kimi_k2", "deepseek_v3"))
    assert isinstance(found, DecoderConfig)
    assert isinstance(known, DecoderConfig)
    assert replace(known, layers=found.layers) == found
    assert found.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    assert (found.num_kv_heads, found.head_dim, found.kv_parts, found.max_model_len) == (1, 576, 1, 131072)
    assert found.layers[0].rope is not None
    assert found.layers[0].rope.scale == 1
    assert [layer.mixture is None for layer in found.layers] == [True, False, False, False, False]


def test_the_text_network_of_kimi_k25_is_kimi_k2() -> None:
    """Keys that others report of the published file of Kimi K2.5."""
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"], "auto_map": {}, "bos_token_id": 163584,
        "eos_token_id": 163585, "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25",
        "pad_token_id": 163839, "text_config": KIMI, "tie_word_embeddings": False, "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>", "vision_config": {"patch_size": 14},
    }  # fmt: skip
    found, known = read_config(whole), read_config(KIMI)
    assert isinstance(found, DecoderConfig)
    assert isinstance(known, DecoderConfig)
    assert replace(known, layers=found.layers, ignored_tensors=found.ignored_tensors) == found
    assert any(re.search(pattern, "mm_projector.proj.0.weight") for pattern in found.ignored_tensors)
    with pytest.raises(ValueError, match="it says odd = 1"):
        read_config(whole | {"odd": 1})


@pytest.mark.parametrize("stated", [{}, {"v_head_dim": None}], ids=str)
def test_a_value_of_minicpm3_has_by_default_its_heads_share_of_the_hidden_size(stated: dict[str, Any]) -> None:
    config = read_config(SIZES | {"model_type": "minicpm3"} | stated)
    assert isinstance(config, DecoderConfig)
    assert config.latent is not None
    assert config.latent.value_dim == 256 // 64
    with pytest.raises(ValueError, match="hidden_size is 60; without v_head_dim, it must be at least 64"):
        read_config(SIZES | {"model_type": "minicpm3", "hidden_size": 60} | stated)


def mistral4(**changes: Any) -> dict[str, Any]:
    """Keys that others report of the published file of Mistral Small 4."""
    rope = {"type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192,
            "max_position_embeddings": 1048576, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}  # fmt: skip
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
             "vocab_size": 131072, "max_position_embeddings": 1048576}  # fmt: skip
    return {"model_type": "mistral4", **sizes, "rope_parameters": rope | changes.pop("rope", {}), **changes}


def test_mistral4_has_factors_on_queries_and_scores() -> None:
    for json in (mistral4(), mistral4(rope_parameters=None)):  # the defaults
        config = read_config(json)
        assert isinstance(config, DecoderConfig)
        assert config.attention_scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
        (temperature,) = {layer.temperature for layer in config.layers}
        assert temperature is not None
        factors = temperature.factors(torch.tensor([0, 8191, 8192, 16383, 16384])).flatten()
        expected = [1.0, 1.0, *[1 + 0.1 * math.log(2)] * 2, 1 + 0.1 * math.log(3)]
        torch.testing.assert_close(factors, torch.tensor(expected))
        assert (config.num_kv_heads, config.head_dim, config.max_model_len) == (1, 320, 1048576)
    plain = read_config(mistral4(rope={"mscale_all_dim": 0, "attention_factor": 1.0}))
    assert isinstance(plain, DecoderConfig)
    assert plain.attention_scale == 128**-0.5
    assert plain.layers[0].rope is not None
    assert plain.layers[0].rope.scale == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head_dim": 64}, "head_dim is 64; it must be qk_nope_head_dim [+] qk_rope_head_dim, which is 128"),
        ({"rope": {"partial_rotary_factor": 1.0}}, "partial_rotary_factor is 1.0; it must be the rotated part of a he"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; it must be the rotated part of a head, 0.5"),
        ({"rope": {"original_max_position_embeddings": None}}, "without original_max_position_embeddings, which it"),
        ({"n_group": 128}, "n_group is 128; it must divide n_routed_experts, which is 128, with at least 2 in each"),
        ({"scoring_func": "sigmoid"}, "it says scoring_func = 'sigmoid', which is not supported"),
    ],
)
def test_what_mistral4_does_not_support_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_config(mistral4(**change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_key_value_heads": 8}, "it says num_key_value_heads = 8, which is not supported"),
        ({"head_dim": 128}, "it says head_dim = 128, which is not supported"),
        ({"n_group": 5}, "n_group is 5; it must divide n_routed_experts, which is 384, with at least 2 in each group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5; it must be at most n_group, which is 4"),
        ({"n_group": 128, "topk_group": 2}, "groups of 3 experts must have num_experts_per_tok, which is 8"),
        ({"moe_layer_freq": 2}, "it says moe_layer_freq = 2, which is not supported"),
        ({"scoring_func": "softmax"}, "it says scoring_func = 'softmax', which is not supported"),
        ({"topk_method": "greedy"}, "it says topk_method = 'greedy', which is not supported"),
        ({"num_mtp_layers": 1}, "num_nextn_predict_layers and num_mtp_layers say different numbers"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5; it must be even"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0; it must be a whole number from 1"),
        ({"index_topk": 2048}, "it says index_topk = 2048, which is not supported"),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}},
            "mscale_all_dim is in the rotary parameters without factor, which it needs",
        ),
        (
            {"model_type": "deepseek_v2", "architectures": None},
            "topk_method is 'noaux_tc'; it must be greedy or group_limi",
        ),
    ],
)
def test_what_a_network_with_latents_does_not_support_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_config(KIMI | change)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_missing_is_named(name: str) -> None:
    file = {key: value for key, value in SIZES.items() if key != name}
    with pytest.raises(ValueError, match=f"{name} is missing; it must be a whole number from 1 to"):
        read_config(file | {"model_type": "llama"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; it must be gelu or gelu_pytorch_tanh or silu"),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
            "rope_parameters.rope_type is 'proportional'; it must be default or",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between kinds of layers"),
        (
            {"model_type": "qwen2", "layer_types": ["linear_attention"] * 5},
            "layer_types is .* it must be a list of 5, each of which is full_attention or sliding_att",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "attention to later tokens"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 64, and num_key_value_heads 5, which must divide it"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0; it must be a whole number from 1"),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": 0.0},
            "attn_logit_softcapping is 0.0; it must be a number from",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1 to 512"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        ({"model_type": "gpt_oss", "experts_per_token": 9}, "it says experts_per_token = 9, which is not supported"),
        ({"model_type": "gpt_oss", "hidden_act": "gelu"}, "it says hidden_act = 'gelu', which is not supported"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts is 0; it must be"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 0}, "moe_intermediate_size is 0; it must be"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 0},
            "decoder_sparse_step is 0; it must be a whole number from 1",
        ),
    ],
)
def test_networks_that_are_not_supported_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_config(SIZES | {"model_type": "llama"} | change)
