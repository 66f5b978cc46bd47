"""What a config.json says is obeyed, or refused by a sentence that names it; and ordinary files are not refused."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
from published_configs import PUBLISHED, published
from state_layouts import MODELS

from worker_service.models.config.config_keys import GENERATION
from worker_service.models.config.text_part import text_part
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.families import FAMILIES
from worker_service.models.registry import read_config
from worker_service.read_keys import ReadKeys

SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
PLAIN: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 7], "initializer_range": 0.02, "use_cache": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.46.1", "rope_scaling": None,
}  # fmt: skip
ORDINARY: dict[str, dict[str, Any]] = {
    "Llama 2": {"model_type": "llama", "_name_or_path": "a/b", "pretraining_tp": 1, "pad_token_id": 0},
    "Llama 3.1": {
        "model_type": "llama", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 512},
    },
    "SmolLM2": {
        "model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000,
        "tie_word_embeddings": True, "transformers.js_config": {"dtype": "q4"},
    },
    "a base of unsloth's": {"model_type": "llama", "unsloth_fixed": True, "unsloth_version": "2024.9", "head_dim": 16},
    "Yarn-Llama 2": {
        "model_type": "llama",
        "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 256, "type": "yarn", "finetuned": True},
    },
    "a dump of all defaults": {
        "model_type": "llama", "add_cross_attention": False, "bad_words_ids": None, "chunk_size_feed_forward": 0,
        "diversity_penalty": 0.0, "do_sample": False, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
        "is_decoder": False, "is_encoder_decoder": False, "pruned_heads": {}, "return_dict": True, "temperature": 1.0,
        "tie_encoder_decoder": False, "torchscript": False, "use_bfloat16": False,
    },
    "Mistral Nemo": {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rope_theta": 1000000.0},
    "Mixtral": {
        "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": False,
        "router_aux_loss_coef": 0.02, "sliding_window": None,
    },
    "Qwen2.5": {
        "model_type": "qwen2", "max_window_layers": 21, "sliding_window": 32768, "use_mrope": False,
        "use_sliding_window": False, "tie_word_embeddings": True,
    },
    "Qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": False, "max_window_layers": 28,
              "sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    "Qwen3-MoE": {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 16, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts": 4,
        "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False,
    },
    "MiMo": {"model_type": "mimo", "attention_bias": True, "head_dim": 16, "num_nextn_predict_layers": 1,
             "use_mrope": False, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
             "architectures": ["MiMoForCausalLM"]},
    "Phi-3": {
        "model_type": "phi3", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096,
        "sliding_window": 2047, "attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "architectures": ["Phi3ForCausalLM"],
    },
    "Phi-4 mini": {
        "model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 512, "rope_scaling": LONGROPE,
        "sliding_window": 262144, "tie_word_embeddings": True,
    },
    "Gemma": {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None, "head_dim": 16},
    "Gemma 2": {
        "model_type": "gemma2", "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
        "sliding_window": 4096, "sliding_window_size": 4096, "attn_logit_softcapping": 50.0,
    },
    "Gemma 3": {
        "model_type": "gemma3_text", "_sliding_window_pattern": 6, "attn_logit_softcapping": None, "head_dim": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0, "sliding_window": 512,
        "use_bidirectional_attention": False,
    },
    "SmolLM3": {
        "model_type": "smollm3", "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "rope_theta": 5000000.0,
        "sliding_window": None, "use_sliding_window": False, "attention_bias": False,
    },
    "Qwen3-Coder": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "qkv_bias": False,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 0, "use_qk_norm": True, "use_sliding_window": False, "sliding_window": None,
    },
    "Falcon 3": {"model_type": "llama", "activation": "swiglu", "hidden_act": "silu", "head_dim": 16},
    "a base of unsloth's, named": {"model_type": "llama", "model_name": "unsloth/a", "unsloth_training": True,
                                   "_from_model_config": True},
    "Llama's first files": {"model_type": "llama", "architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048},
    "DeepSeek-R1-0528-Qwen3": {
        "model_type": "qwen3", "head_dim": 16, "rope_theta": 1000000, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
            "attn_factor": 0.8782488562869419},
    },
    "Command R7B": {
        "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid",
        "head_dim": 16, "layer_switch": 4, "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True,
    },
    "Command A": {
        "model_type": "cohere2", "_sliding_window_pattern": 4, "layer_switch": 4, "rotary_pct": 1.0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "position_embedding_type": "rope_gptj",
        "use_embedding_sharing": True,
    },
    "Ernie 4.5": {"model_type": "ernie4_5", "architectures": ["Ernie4_5_ForCausalLM"], "compression_ratio": 1.0,
                  "head_dim": 16, "use_bias": False},
    "Exaone 4": {
        "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "head_dim": 16, "sliding_window": 4096,
        "sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "Apertus": {"model_type": "apertus", "hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True},
    "GLM-4.5": {
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "first_k_dense_replace": 1, "head_dim": 16,
        "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "use_qk_norm": True, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 1000000, "rope_scaling": None,
    },
    "MiniMax M2": {
        "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1, 1, 1],
        "head_dim": 16, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1,
        "num_experts_per_tok": 2, "num_local_experts": 4, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "rope_theta": 5000000, "rotary_dim": 8, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
        "sliding_window": None, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    },
    "Olmo 3": {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "attention_bias": False,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "rope_theta": 500000, "sliding_window": 4096,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 512, "rope_type": "yarn"},
    },
    "Llama 4 Scout's text": {
        "model_type": "llama4_text", "_attn_implementation_autoset": True, "attention_bias": False,
        "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "cache_implementation":
        "hybrid", "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 16, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 96, "no_rope_layers": [], "num_experts_per_tok": 1, "num_local_experts": 4,
        "output_router_logits": False, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "use_qk_norm": True,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 512},
    },
    "StableLM": {
        "model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-05, "norm_eps": 1e-05,
        "partial_rotary_factor": 0.25, "rope_pct": 0.25, "rotary_scaling_factor": 1.0, "use_qkv_bias": False,
    },
    "StarCoder 2": {
        "model_type": "starcoder2", "activation_function": "gelu", "attention_softmax_in_fp32": True,
        "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05, "mlp_type": "default", "norm_epsilon": 1e-05,
        "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
    },
    "Pythia": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu",
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True,
    },
    "StarCoder": {
        "model_type": "gpt_bigcode", "attention_softmax_in_fp32": True, "multi_query": True, "n_embd": 64, "n_head": 4,
        "n_inner": 256, "n_layer": 2, "n_positions": 2048, "scale_attn_weights": True, "summary_type": "cls_index",
        "summary_use_proj": True, "validate_runner_input": True, "inference_runner": 0, "pad_key_length": True,
        "pre_allocate_kv_cache": False, "vocab_size": 99,
    },
    "GPT-2 medium": {
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024,
        "n_special": 0, "predict_special_tokens": True, "architectures": ["GPT2LMHeadModel"], "vocab_size": 99,
    },
    "E5": {"model_type": "bert", "architectures": ["BertModel"], "export_model_type": "transformer",
           "type_vocab_size": 2},
    "GPT-2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 1024, "n_embd": 64, "n_head": 4, "n_layer": 2,
        "n_positions": 1024, "summary_type": "cls_index", "architectures": ["GPT2LMHeadModel"], "vocab_size": 99,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "BERT": {
        "model_type": "bert", "gradient_checkpointing": False, "position_embedding_type": "absolute",
        "type_vocab_size": 2, "directionality": "bidi", "pooler_type": "first_token_transform",
        "architectures": ["BertForMaskedLM"],
    },
    "a reranker": {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    },
    "ModernBERT": {
        "model_type": "modernbert", "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "norm_eps": 1e-05,
        "layer_norm_eps": 1e-05, "local_rope_theta": 10000.0, "position_embedding_type": "absolute", "pad_token_id": 0,
        "reference_compile": False, "repad_logits_with_grad": False,
    },
    "mmBERT": {"model_type": "modernbert", "position_embedding_type": "sans_pos", "pad_token_id": 0},
    "T5": {
        "model_type": "t5", "d_model": 64, "d_ff": 64, "d_kv": 16, "num_layers": 2, "n_positions": 512,
        "output_past": True, "relative_attention_num_buckets": 32, "dense_act_fn": "relu", "is_gated_act": False,
        "vocab_size": 99, "architectures": ["T5ForConditionalGeneration"], "task_specific_params": {"a": {"b": 1}},
    },
    "BART": {
        "model_type": "bart", "_num_labels": 3, "add_bias_logits": False, "add_final_layer_norm": False,
        "classif_dropout": 0.0, "d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_layers": 1, "decoder_layers": 1, "force_bos_token_to_be_generated": True, "normalize_before": False,
        "normalize_embedding": True, "num_hidden_layers": 1, "static_position_embeddings": False, "prefix": " ",
        "vocab_size": 99,
    },
}  # fmt: skip
WITHOUT_GROUPS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
UNGROUPED = ("BERT", "E5", "a reranker", "ModernBERT", "mmBERT", "Pythia")
"""Whose keys and values have as many heads as the queries."""
OTHER_SIZES = ("GPT-2", "GPT-2 medium", "StarCoder", "T5", "BART")
"""Whose files have other names for them."""


@pytest.mark.parametrize("name", ORDINARY)
def test_files_as_they_are_published_are_read(name: str) -> None:
    sizes = {} if name in OTHER_SIZES else WITHOUT_GROUPS if name in UNGROUPED else SIZES
    config = read_config(PLAIN | sizes | ORDINARY[name])
    assert config.vocabulary_size in (99, 500)


@pytest.mark.parametrize("model", [model for model in PUBLISHED if model not in MODELS])
def test_files_of_published_models_are_read(model: str) -> None:
    """The others are read by test_model_table.py, which compares their caches with the docs' table."""
    file = published(model)
    text = file.get("text_config", file)
    config = read_config(file)
    size = next(text[name] for name in ("hidden_size", "d_model", "n_embd") if name in text)
    assert (config.vocabulary_size, config.hidden_size) == (text["vocab_size"], size)


SAVED = [model for model in PUBLISHED if text_part(published(model))["model_type"] in FAMILIES
         and model not in ("Kimi K2", "Llama 4 Scout")]  # fmt: skip
"""Natively run models. transformers does not know Kimi K2, and refuses 4 for a boolean in Llama 4's file."""


@pytest.mark.parametrize("model", SAVED)
def test_a_published_file_says_the_same_after_transformers_has_saved_it(model: str) -> None:
    from transformers import AutoConfig

    file = {name: value for name, value in published(model).items() if name != "torch_dtype"}
    saved = json.loads(AutoConfig.for_model(**file).to_json_string())
    assert repr(read_config(saved)) == repr(read_config(file))


@pytest.mark.skipif(find_spec("timm") is not None, reason="the package is installed")
def test_a_network_that_needs_a_missing_package_is_refused_by_the_packages_name() -> None:
    with pytest.raises(ValueError, match=r"gemma3n is not supported: it needs a package .*: .* the timm library"):
        read_config({"model_type": "gemma3n", "architectures": ["Gemma3nForCausalLM"]})


def test_the_longest_text_of_kimi_linear_is_its_model_max_length() -> None:
    """In other families, the key is a note of the tokenizer's."""
    assert read_config(published("Kimi Linear 48B") | {"model_max_length": 4096}).max_model_len == 4096


NAMED_ALIKE = ("gemma3_text", "granite", "mistral", "olmo2", "phi3", "qwen2", "qwen3_moe")
"""Families whose files have llama's names for their sizes."""
KIMI = PUBLISHED["Kimi Linear 48B"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"attention_multiplier": 0.5}, "it says attention_multiplier = 0.5, which is not sup"),
    "several": ({"logit_scale": 2, "qk_norm": True}, "it says logit_scale = 2, qk_norm = True, which"),
    "a part of a rotation": ({"partial_rotary_factor": 0.5}, "it says partial_rotary_factor = 0.5"),
    "a part of a rotation, in Qwen2": ({"model_type": "qwen2", "partial_rotary_factor": 0.5}, "it says partial_rotary"),
    "a part of a rotation, in Mistral": ({"model_type": "mistral", "partial_rotary_factor": 0.5}, "it says partial_ro"),
    "within positions": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}},
        r"it says rope_scaling.mrope_section = \[1, 2\]",
    ),
    "two bases": (
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
        "rope_theta is 5.0, and rope_theta 6.0 in the rotary parameters",
    ),
    "two kinds of positions": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters and rope_scaling differ",
    ),
    "another original length than Phi-3's": (
        {"model_type": "phi3", "rope_scaling": LONGROPE | {"original_max_position_embeddings": 512},
         "partial_rotary_factor": 0.75},
        "original_max_position_embeddings is 512 in the rotary parameters; .* counts, which is 4096 if",
    ),
    "two names of a kind of positions": (
        {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
        "it says rope_scaling.type = 'linear'",
    ),
    "long contexts of another kind": (
        {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 9}},
        "it says dual_chunk_attention_config = {'chunk_size': 9}",
    ),
    "a window that is not used": (
        {"model_type": "mistral", "use_sliding_window": False},
        "it says use_sliding_window = False",
    ),
    "kinds of layers": ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "it says layer_types = "),
    "caps that no code reads": ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
    "a classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "names LlamaForSequenceClassification,"),
    "a tagger": ({"architectures": ["LlamaForTokenClassification"]}, "names LlamaForTokenClassification, which is"),
    "a reward model": ({"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"}, "names Qwen2ForRewardModel"),
    "another reward model": ({"architectures": ["LlamaRewardModel"]}, "names LlamaRewardModel, which is not the"),
    "a reward model of causal name": ({"architectures": ["LlamaForCausalLMRewardModel"]}, "CausalLMRewardModel, which"),
    "an encoder of decoder's name": ({"architectures": ["LlamaEncoderModel"]}, "names LlamaEncoderModel, which is not"),
    "a body without a mask": ({"architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel, which is not"),
    "another family's network": ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM, .* of a model llama that"),
    "one of two networks": ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "names MistralForCausalLM"),
    "another family's, in transformers' code": (
        {"model_type": "olmo2", "architectures": ["OlmoForCausalLM"]},
        "names OlmoForCausalLM, which is not the network of a model olmo2",
    ),
    "Qwen3's heads without norms": ({"model_type": "qwen3_moe", "use_qk_norm": False}, "it says use_qk_norm = False"),
    "a shared expert": ({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 9}, "says shared_expert_interm"),
    "Llama's heads with norms": ({"use_qk_norm": True}, "it says use_qk_norm = True"),
    "no layers with experts, without a list": (
        SIZES | {"model_type": "llama4_text", "interleave_moe_layer_step": 0},
        "interleave_moe_layer_step is 0; it must be",
    ),
    "two activations": ({"activation": "swiglu", "hidden_act": "gelu"}, "it says activation = 'swiglu'"),
    "YaRN's two factors": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 0.9, "attention_factor": 1.0}},
        r"attn_factor is 0\.9, and attention_factor 1\.0",
    ),
    "YaRN's factor of nothing": ({"rope_scaling": {"type": "yarn", "factor": 4, "attn_factor": 0}}, "attn_factor is 0"),
    "YaRN's factor beside another kind": (
        {"rope_scaling": {"type": "linear", "factor": 4.0, "attn_factor": 0.9}},
        r"it says rope_scaling\.attn_factor = 0\.9",
    ),
    "YaRN's factor, in transformers' code": (
        {"model_type": "olmo2", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.9}},
        r"it says attn_factor = 0\.9",
    ),
    "no architectures": ({"architectures": "LlamaForCausalLM"}, "architectures is not a list of names"),
    "in transformers' code": ({"model_type": "olmo2", "clip_qkv": 5.0}, "it says clip_qkv = 5.0, which is not"),
    "its positions": (
        {"model_type": "olmo2", "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}},
        "it says beta_fast = 3, which is not supported in a model olmo2 with positions of type linear",
    ),
    "its rotations": ({"model_type": "olmo2", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and the"),
    "positions that are not turned": (
        {"model_type": "gpt2", "rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "it says|its rotary embeddings are of type linear, but the code of gpt2 rotates no heads",
    ),
    "its head": (
        {"model_type": "olmo2", "architectures": ["Olmo2ForSequenceClassification"]},
        "names Olmo2ForSequenceClassification, which is not the network of a model olmo2 that continues text",
    ),
    "a private name": ({"model_type": "olmo2", "_secret": 1}, "it says _secret = 1"),
    "an encoder": ({"model_type": "bert", "position_embedding_type": "relative_key"}, "it says position_embedding"),
    "an encoder's head": ({"model_type": "bert", "architectures": ["BertForTokenClassification"]}, "whose head is not"),
    "an encoder and a decoder": ({"model_type": "bart", "normalize_before": True}, "it says normalize_before = True"),
    "their head": (
        {"model_type": "bart", "architectures": ["BartForSequenceClassification"]},
        "names BartForSequenceClassification; supported is BartForConditionalGeneration",
    ),
    "no name of a family": ({"model_type": ["llama"]}, r"model_type is \['llama'\]; it must be the name of a family"),
    "two names of one number": (
        {"model_type": "gpt2", "n_layer": 2, "num_hidden_layers": 3},
        "num_hidden_layers is 3, and n_layer, which means the same, 2",
    ),
    "layers without end": ({"model_type": "gpt2", "n_layer": 10**6}, "n_layer is 1000000; it must be at most 512"),
    "positions of Kimi's": (KIMI | {"mla_use_nope": False}, "it says mla_use_nope = False"),
    "a router of Kimi's": (KIMI | {"moe_router_activation_func": "softmax"}, "says moe_router_activation_func = 'soft"),
    "experts of Kimi's in no groups": (KIMI | {"use_grouped_topk": False}, "it says use_grouped_topk = False"),
    "Kimi's layers for drafts": (KIMI | {"num_nextn_predict_layers": 1}, "it says num_nextn_predict_layers = 1"),
    "heads of no size of Kimi's": (KIMI | {"head_dim": 71}, "it says head_dim = 71"),
    "a base of positions that Kimi lacks": (KIMI | {"mla_use_nope": None}, "it says rope_theta = 10000"),
    "a gate of a newer Kimi's": (
        KIMI | {"linear_attn_config": KIMI["linear_attn_config"] | {"gate_lower_bound": -5.0}},
        r"it says linear_attn_config\.gate_lower_bound = -5\.0",
    ),
    "some of Kimi's layers": (
        KIMI | {"linear_attn_config": {"full_attn_layers": [1]}},
        r"it says linear_attn_config\.full_attn_layers = \[1\]",
    ),
    "another temperature": (
        PUBLISHED["Llama 4 Scout"]["text_config"] | {"attn_temperature_tuning": 3},
        "attn_temperature_tuning is 3; it must be true or false",
    ),
    "two sizes of Nemotron's heads": (
        PUBLISHED["Nemotron-H 8B"] | {"head_dim": 64}, "it says attention_head_dim = 128",
    ),
    "a limit of time steps": (
        PUBLISHED["Nemotron 3 Ultra"] | {"time_step_limit": [0.0, 1e30]}, r"it says time_step_limit = \[0\.0, 1e\+30\]",
    ),
    "gates of another activation": (
        PUBLISHED["Qwen3.6 27B"]["text_config"] | {"output_gate_type": "sigmoid"}, "it says output_gate_type = 'sigmo",
    ),
    "a text network alone": (PUBLISHED["Qwen3.6 27B"] | {"language_model_only": True}, "language_model_only = True, w"),
    "MiMo's layers in another order": (
        PUBLISHED["MiMo V2 Flash"] | {"hybrid_layer_pattern": [1] * 48}, "it says hybrid_layer_pattern = ",
    ),
    "MiMo's heads": (PUBLISHED["MiMo V2 Flash"] | {"swa_num_key_value_heads": 4}, "says swa_num_key_value_heads = 4"),
    "MiMo's positions": (PUBLISHED["MiMo V2 Flash"] | {"swa_rope_theta": 5}, "it says swa_rope_theta = 5"),
    "two bases of LFM2's": (PUBLISHED["LFM2 350M"] | {"theta": 5.0}, "it says theta = 5"),
    "an encoder's": ({"model_type": "bert", "num_hidden_layers": 513}, "num_hidden_layers is 513; it must be at most"),
    "a decoder's": ({"model_type": "bart", "decoder_layers": 10**6}, "decoder_layers is 1000000; it must be at most"),
    "a factor that is no number": (
        {"model_type": "granite", "attention_multiplier": float("nan")},
        "attention_multiplier is nan; it must be a finite number",
    ),
    "logits that are divided by 0": ({"model_type": "granite", "logits_scaling": 0.0}, "logits_scaling is 0.0; it mus"),
    "endless norms": ({"model_type": "bert", "layer_norm_eps": float("inf")}, "layer_norm_eps is inf; it must be"),
    "roots of negative numbers": ({"model_type": "bert", "layer_norm_eps": -1.0}, "layer_norm_eps is -1.0; it must be"),
    "positions that are divided by 0": (
        {"model_type": "olmo2", "rope_scaling": {"rope_type": "linear", "factor": 0}},
        "rope_scaling.factor is 0; it must be a number above 0",
    ),
    "layers that are divided by 0": (
        {"model_type": "modernbert", "global_attn_every_n_layers": 0, "pad_token_id": 0},
        "modulo by zero, where 0 is global_attn_every_n_layers",
    ),
    "padding of no token": ({"model_type": "olmo2", "pad_token_id": 500}, "pad_token_id is 500, and vocab_size is 500"),
    "an encoder's padding": ({"model_type": "bert", "pad_token_id": 99}, "pad_token_id is 99, and vocab_size is 99"),
    "padding behind all positions": (
        {"model_type": "roberta", "pad_token_id": 98, "max_position_embeddings": 99},
        "pad_token_id is 98, and max_position_embeddings 99: positions begin",
    ),
    "texts of no kind": ({"model_type": "bert", "type_vocab_size": 0}, "type_vocab_size is 0; it must be a whole"),
    "heads that do not divide": (
        {"model_type": "bart", "d_model": 64, "decoder_attention_heads": 3},
        "d_model is 64, and decoder_attention_heads 3, which must divide it",
    ),
    "a length of another type": ({"model_type": "t5", "n_positions": True}, "n_positions is True; it must be a whole"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_obeyed_is_refused_by_name(name: str) -> None:
    change, sentence = REFUSED[name]
    family = change.get("model_type", "llama")
    sizes = SIZES if family in ("llama", *NAMED_ALIKE) else {"vocab_size": 99}
    with pytest.raises(ValueError, match=sentence):
        read_config({"model_type": "llama"} | sizes | change)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text", "gemma4_text", "olmo3"])
def test_a_key_that_transformers_ignores_for_one_kind_of_layers_is_refused(family: str) -> None:
    """The network may be transformers' or native."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    json = {"model_type": family, "pad_token_id": 0} | ({} if family == "gemma3n_text" else SIZES)

    def ropes(truncate: bool) -> dict[str, Any]:
        return {"rope_parameters": {"full_attention": scaled | {"truncate": truncate}, "sliding_attention": plain}}

    read_config(json | ropes(True))
    with pytest.raises(ValueError, match="truncate is False in the rotary parameters of one kind of layers, where tr"):
        read_config(json | ropes(False))


def test_all_that_transformers_takes_for_generation_is_known() -> None:
    from transformers import GenerationConfig

    assert GENERATION | {"use_cache"} >= GenerationConfig._get_default_generation_params().keys()


def test_what_was_not_read_is_known() -> None:
    keys = ReadKeys({"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}, "g": None, "h": [], "i": {"j": 1}, "k": {}})
    within = keys.group("b").group("d")
    assert (keys.integer("a"), within.integer("e"), keys.integer("z", 5), "i" in keys) == (1, 3, 5, True)
    assert keys.unread() == {"b.c": 2, "b.d.f": 4, "i": {"j": 1}}
    keys.neutral(i={"j": 2})
    assert "i" in keys.unread()
    keys.neutral(i={"j": 1})
    keys.without_effect("b")
    assert keys.unread() == {}


def test_an_original_length_says_nothing_where_positions_are_not_scaled() -> None:
    """Phi-3 has a default of its own for it."""
    said = {"rope_scaling": {"original_max_position_embeddings": 8192}}
    assert read_config({"model_type": "phi3"} | SIZES | said).max_model_len == 4096


SCALED: list[tuple[dict[str, Any], int]] = [
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 16384),
    ({"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}}, 4096),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "original_max_position_embeddings": 1024}}, 2048),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096),
    ({"rope_scaling": ORDINARY["Llama 3.1"]["rope_scaling"]}, 4096),
    ({"model_type": "phi3", "rope_scaling": LONGROPE, "partial_rotary_factor": 0.75,
      "original_max_position_embeddings": 512}, 512),
    ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4096),
    ({"max_sequence_length": 2048}, 2048),
    ({"model_type": "olmo2", "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                              "original_max_position_embeddings": 2048}}, 8192),
    ({"model_type": "olmo2", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
    ({"model_type": "olmo2", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
]  # fmt: skip


@pytest.mark.parametrize(("change", "longest"), SCALED, ids=str)
def test_the_longest_text_is_what_positions_are_scaled_for(change: dict[str, Any], longest: int) -> None:
    """As vLLM has it, but for "dynamic", whose frequencies change with a text's length."""
    assert read_config({"model_type": "llama"} | SIZES | change).max_model_len == longest


def test_a_factor_of_yarns_first_code_multiplies_the_usual_one() -> None:
    """As vLLM has it; transformers drops the key. In DeepSeek's file the product is 1."""
    config = read_config(PLAIN | SIZES | ORDINARY["DeepSeek-R1-0528-Qwen3"])
    assert isinstance(config, DecoderConfig)
    assert [layer.rope and layer.rope.scale for layer in config.layers] == [pytest.approx(1.0, abs=1e-6)] * 4
