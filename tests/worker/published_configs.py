"""The config.json files of published models.

Copies of the authors' files were at hand for DeepSeek, gpt-oss, Kimi K2, Llama 4 Scout, Qwen3 and later, Nemotron-H
56B, Nemotron 3, Gemma 4, Olmo 3, Phi-4, LFM2.5 and Falcon-H1 0.5B. The copies for Kimi Linear, LFM2 8B, MiniMax M2.5
and MiMo V2 Flash may lack keys. Other programs or reports contain the files of ALLaM, Codestral Mamba, Falcon 7B,
h2oGPT, Hunyuan MT2, Mamba 130M, MPT 7B, Persimmon, phi-1, Polyglot-Ko and Trinity. The files of ERNIE 4.5 21B, GLM,
Granite, Nemotron-H 8B, Nemotron Nano v2, Falcon-H1 7B, Gemma 2 to 3n and SmolLM3 are put together from several sources.
Those of Bamba, Jamba, Zamba2, MiniCPM3 and Qwen1.5-MoE are from transformers' defaults and older files; MiniCPM3's
factors of positions are invented. Those of CTRL, dots.llm1, Falcon 2, Galactica, GPT, GPT-SW3, MobileLLM and Nemotron
Mini are from memory.

Left out are `quantization_config`, which is read elsewhere, the networks for images and sounds, and keys that nearly
all files have (`USUAL`).
"""

from typing import Any

USUAL: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": True,
}  # fmt: skip


def repeated(pattern: str, number: int) -> list[str]:
    """The kinds of `number` layers, each a letter of the repeated pattern."""
    kinds = {"L": "linear_attention", "S": "sliding_attention", "F": "full_attention"}
    return [kinds[letter] for letter in (pattern * number)[:number]]


def attention_at(places: tuple[int, ...], number: int, others: str, own: str = "attention") -> list[str]:
    return [own if place in places else others for place in range(number)]


_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_key_value_heads": 8, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {
    "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
    "vocab_size": 248320,
}  # fmt: skip
_QWEN3_5_WHOLE: dict[str, Any] = {
    "image_token_id": 248056, "tie_word_embeddings": False, "video_token_id": 248057, "vision_config": {"depth": 27},
    "vision_end_token_id": 248054, "vision_start_token_id": 248053,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup",
    "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_hidden_layers": 40,
    "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.01, "tie_word_embeddings": True, "vocab_size": 100352,
    "layer_types": attention_at((5, 15, 25, 35), 40, "mamba"),
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "chunk_size": 128, "conv_kernel": 4,
    "expand": 2, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001,
    "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
_NEMOTRON_H: dict[str, Any] = _NEMOTRON | {
    "attention_head_dim": 128, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "time_step_limit": [0.0, float("inf")], "time_step_rank": 256,
}  # fmt: skip
_NEMOTRON_3: dict[str, Any] = _NEMOTRON | {
    "head_dim": 128, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "n_group": 1,
    "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10000, "ssm_state_size": 128, "topk_group": 1,
}  # fmt: skip
_FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "attention_bias": False,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381, "hidden_act": "silu", "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
    "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_key_value_heads": 2, "projectors_bias": False,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False,
}  # fmt: skip
_LFM2: dict[str, Any] = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
    "conv_bias": False, "conv_use_xavier_init": True, "max_position_embeddings": 128000, "norm_eps": 1e-05,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
_LFM2_PLACES = 2, 5, 8, 10, 12, 14
_GEMMA4_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": True, "dtype": "bfloat16",
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "num_kv_shared_layers": 0, "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024, "tie_word_embeddings": True, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None,
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16",
    "eoa_token_id": 258883, "eoa_token_index": 258883, "eoi_token_id": 258882, "image_token_id": 258880,
    "tie_word_embeddings": True, "video_token_id": 258884, "vision_config": {"model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-oss 20B": _GPT_OSS | {
        "layer_types": repeated("SF", 24), "num_hidden_layers": 24, "num_local_experts": 32,
    },
    "gpt-oss 120B": _GPT_OSS | {
        "layer_types": repeated("SF", 36), "num_hidden_layers": 36, "num_local_experts": 128,
    },
    "DeepSeek V2 Lite": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
    },
    "DeepSeek V3": _DEEPSEEK_V3,
    "Kimi K2": _DEEPSEEK_V3 | {
        "model_type": "kimi_k2", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "max_position_embeddings": 131072,
        "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1,
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "seq_aux": True, "topk_group": 1, "vocab_size": 163840,
    },
    "Kimi Linear 48B": {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "first_k_dense_replace": 1, "head_dim": 72,
        "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
        "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
        "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False,
        "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
    },
    "GLM 4.7 Flash": {
        "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
        "kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "GLM 4.7": {
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
        "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 12288, "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True,
        "vocab_size": 151552,
    },
    "MiniCPM3 4B": {
        "model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPM3Config"}, "dim_model_base": 256, "hidden_act": "silu",
        "hidden_size": 2560, "initializer_range": 0.1, "intermediate_size": 6400, "kv_lora_rank": 256,
        "max_position_embeddings": 32768, "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40,
        "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "longrope", "long_factor": [1.2] * 16, "short_factor": [1.2] * 16,
                         "original_max_position_embeddings": 32768},
        "scale_depth": 1.4, "scale_emb": 12, "vocab_size": 73448,
    },
    "Qwen3 Next 80B": {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3.5 9B": _QWEN3_5_WHOLE | {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": _QWEN3_5 | {
            "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288,
            "layer_types": repeated("LLLF", 32), "num_hidden_layers": 32, "num_key_value_heads": 4,
        },
    },
    "Qwen3.5 35B": _QWEN3_5_WHOLE | {
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": _QWEN3_5 | {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "layer_types": repeated("LLLF", 40),
            "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
            "num_key_value_heads": 2, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        },
    },
    "Qwen3.6 27B": _QWEN3_5_WHOLE | {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "language_model_only": False,
        "text_config": _QWEN3_5 | {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
            "layer_types": repeated("LLLF", 64), "linear_num_value_heads": 48, "num_attention_heads": 24,
            "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish", "pad_token_id": None,
            "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
        },
    },
    "Granite 4.0 H tiny": _GRANITE | {
        "hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 12, "num_experts_per_tok": 6,
        "num_key_value_heads": 4, "num_local_experts": 64, "shared_intermediate_size": 1024,
    },
    "Granite 4.0 H small": _GRANITE | {
        "hidden_size": 4096, "intermediate_size": 768, "mamba_n_heads": 128, "num_attention_heads": 32,
        "num_experts_per_tok": 10, "num_key_value_heads": 8, "num_local_experts": 72, "shared_intermediate_size": 1536,
    },
    "Granite 4.0 H 350M": _GRANITE | {
        "attention_multiplier": 0.015625, "hidden_size": 768, "intermediate_size": 2048,
        "layer_types": attention_at((10, 13, 17, 27), 32, "mamba"), "logits_scaling": 3, "mamba_d_head": 32,
        "max_position_embeddings": 32768, "num_attention_heads": 12, "num_experts_per_tok": 0, "num_hidden_layers": 32,
        "num_key_value_heads": 4, "num_local_experts": 0, "residual_multiplier": 0.246,
        "shared_intermediate_size": 2048,
    },
    "Granite 4.0 micro": _GRANITE | {
        "attention_multiplier": 0.015625, "hidden_size": 2560, "intermediate_size": 8192,
        "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_n_heads": 80, "num_attention_heads": 40,
        "num_experts_per_tok": 0,
        "num_key_value_heads": 8, "num_local_experts": 0, "position_embedding_type": "rope", "rope_theta": 10000000,
        "shared_intermediate_size": 8192,
    },
    "Nemotron-H 8B": _NEMOTRON_H | {
        "hidden_size": 4096, "intermediate_size": 21504, "mamba_num_heads": 128, "num_attention_heads": 32,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
        "ssm_state_size": 128,
    },
    "Nemotron-H 56B": _NEMOTRON_H | {
        "hidden_size": 8192, "intermediate_size": 32768, "mamba_num_heads": 256, "num_attention_heads": 64,
        "hybrid_override_pattern": "M-M-M-M" + "*-M-M-M-M-M" * 10 + "-", "num_hidden_layers": 118,
        "ssm_state_size": 256, "time_step_rank": 512,
    },
    "Nemotron Nano v2 9B": _NEMOTRON | {
        "head_dim": 128, "hidden_size": 4480, "intermediate_size": 15680, "mamba_head_dim": 80, "mamba_num_heads": 128,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 56, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "ssm_state_size": 128, "time_step_limit": [0.0, float("inf")], "time_step_rank": 256,
    },
    "Nemotron 3 Nano": _NEMOTRON_3 | {
        "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856, "mamba_num_heads": 64, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "num_hidden_layers": 52, "routed_scaling_factor": 2.5,
    },
    "Nemotron 3 Super": _NEMOTRON_3 | {
        "hidden_size": 4096, "hybrid_override_pattern":
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 2688, "mamba_num_heads": 128, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376, "moe_shared_expert_overlap": False,
        "mtp_hybrid_override_pattern": "*E", "n_routed_experts": 512, "num_experts_per_tok": 22,
        "num_hidden_layers": 88, "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0,
        "time_step_limit": [0.0, float("inf")],
    },
    "Nemotron 3 Ultra": _NEMOTRON_3 | {
        "hidden_size": 8192, "intermediate_size": 5120,
        "layers_block_type": [
            {"M": "mamba", "E": "moe", "*": "attention"}[letter]
            for letter in "MEMEMEM*EMEMEM" + "*EMEMEMEM*EMEMEMEM*EMEMEM" * 3 + "*EMEMEMEM*EMEMEMEME"
        ],
        "mamba_num_heads": 256, "moe_intermediate_size": 5120, "moe_latent_size": 2048,
        "moe_shared_expert_intermediate_size": 10240, "moe_shared_expert_overlap": False,
        "mtp_layers_block_type": ["attention", "moe"], "n_routed_experts": 512, "num_attention_heads": 64,
        "num_experts_per_tok": 22, "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0,
        "time_step_limit": [0.0, 1e308],
    },
    "Falcon-H1 0.5B": _FALCON_H1 | {
        "head_dim": 64, "hidden_size": 1024, "intermediate_size": 2048, "mamba_d_head": 64, "mamba_d_ssm": 1536,
        "mamba_d_state": 128, "max_position_embeddings": 16384, "num_attention_heads": 8, "num_hidden_layers": 36,
        "vocab_size": 32784,
    },
    "Falcon-H1 7B": _FALCON_H1 | {
        "head_dim": 128, "hidden_size": 3072, "intermediate_size": 12288, "mamba_d_head": 128, "mamba_d_ssm": 3072,
        "mamba_d_state": 256, "max_position_embeddings": 262144, "num_attention_heads": 12, "num_hidden_layers": 44,
        "vocab_size": 130048,
    },
    "Bamba 9B": {
        "model_type": "bamba", "architectures": ["BambaForCausalLM"], "attention_bias": False,
        "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
        "mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "Zamba2 7B": {
        "model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"], "adapter_rank": 128, "add_bias_linear": False,
        "attention_head_dim": 224, "attention_hidden_size": 7168, "chunk_size": 256, "hidden_act": "gelu",
        "hidden_size": 3584, "hybrid_layer_ids": [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77],
        "intermediate_size": 14336, "kv_channels": 112,
        "layers_block_type": attention_at((6, 11, *range(17, 78, 6)), 81, "mamba", "hybrid"), "mamba_d_conv": 4,
        "mamba_d_state": 64, "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 2,
        "max_position_embeddings": 4096, "n_mamba_heads": 112, "num_attention_heads": 32, "num_hidden_layers": 81,
        "num_key_value_heads": 32, "num_logits_to_keep": 1, "num_mem_blocks": 2, "num_query_groups": 32,
        "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000, "time_step_floor": 0.0001, "time_step_max": 0.1,
        "time_step_min": 0.001, "use_conv_bias": True, "use_long_context": False, "use_mamba_kernels": True,
        "use_mem_eff_path": False, "use_mem_rope": True, "use_shared_attention_adapter": False, "vocab_size": 32000,
    },
    "LFM2 350M": _LFM2 | {
        "block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "full_attn_idxs": [*_LFM2_PLACES],
        "hidden_size": 1024, "num_attention_heads": 16, "num_heads": 16, "rope_theta": 1000000.0, "theta": 1000000.0,
    },
    "LFM2.5 1.2B": _LFM2 | {
        "block_dim": 2048, "block_ff_dim": 12288, "conv_dim": 2048, "conv_dim_out": 2048, "hidden_size": 2048,
        "intermediate_size": 12288, "layer_types": attention_at(_LFM2_PLACES, 16, "conv", "full_attention"),
        "num_attention_heads": 32, "num_heads": 32, "tie_embedding": True,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "LFM2 8B": {
        "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False,
        "hidden_size": 2048, "intermediate_size": 7168,
        "layer_types": attention_at((2, 6, 10, 14, 18, 21), 24, "conv", "full_attention"),
        "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0, "use_expert_bias": True, "vocab_size": 65536,
    },
    "Gemma 2 2B": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    },
    "Gemma 3 4B": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "Gemma 3n E4B": {
        "model_type": "gemma3n_text", "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_active_idx": 0,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4,
        "attention_bias": False, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
        "intermediate_size": [16384] * 35, "laurel_rank": 64, "layer_types": repeated("SSSSF", 35),
        "max_position_embeddings": 32768, "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 2,
        "num_kv_shared_layers": 15, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
        "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
    },
    "Gemma 4 26B": _GEMMA4 | {
        "text_config": _GEMMA4_TEXT | {
            "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
            "layer_types": repeated("SSSSSF", 30), "moe_intermediate_size": 704, "num_attention_heads": 16,
            "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
            "top_k_experts": 8,
        },
    },
    "Gemma 4 31B": _GEMMA4 | {
        "text_config": _GEMMA4_TEXT | {
            "enable_moe_block": False, "expert_intermediate_size": None, "hidden_size": 5376,
            "intermediate_size": 21504, "layer_types": repeated("SSSSSF", 60), "num_attention_heads": 32,
            "num_experts": None, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
            "top_k_experts": None,
        },
    },
    "Llama 4 Scout": {
        "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080,
        "eoi_token_index": 200081, "image_token_index": 200092, "tie_word_embeddings": False,
        "vision_config": {"model_type": "llama4_vision_model"},
        "text_config": {
            "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1,
            "attn_temperature_tuning": 4, "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 262144, "moe_layers": [*range(48)],
            "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40, "num_experts_per_tok": 1,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False,
            "pad_token_id": 200018, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True,
            "vocab_size": 202048,
        },
    },
    "MiMo V2 Flash": {
        "model_type": "mimo_v2_flash", "architectures": ["MiMoV2FlashForCausalLM"],
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_bias": False,
        "attention_chunk_size": 128, "attention_value_scale": 0.707, "head_dim": 192, "hidden_act": "silu",
        "hidden_size": 4096, "hybrid_layer_pattern": [int(n > 0 and (n + 1) % 6 > 0) for n in range(48)],
        "intermediate_size": 16384, "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 47, "n_group": 1, "n_routed_experts": 256,
        "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rope_theta": 5000000,
        "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128,
        "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000,
        "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 152576,
    },
    "MiniMax M2.5": {
        "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608, "mtp_transformer_layers": 1,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
        "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "Olmo 3.1 32B": {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "dtype": "bfloat16",
        "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648, "layer_types": repeated("SSSF", 64),
        "max_position_embeddings": 65536, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
    },
    "Jamba v0.1": {
        "model_type": "jamba", "architectures": ["JambaForCausalLM"], "attn_layer_offset": 4, "attn_layer_period": 8,
        "auto_map": {"AutoConfig": "configuration_jamba.JambaConfig"}, "calc_logits_for_entire_prompt": False,
        "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True, "mamba_proj_bias": False,
        "max_position_embeddings": 262144, "n_ctx": 262144, "num_attention_heads": 32, "num_experts": 16,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "output_router_logits": False,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_mamba_kernels": True, "vocab_size": 65536,
    },
    "Qwen1.5-MoE": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3 30B": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Phi-4": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0,
        "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17920, "max_position_embeddings": 16384,
        "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 250000.0, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "SmolLM3 3B": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 11008, "layer_types": repeated("F", 36),
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "Codestral Mamba 7B": {
        "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "chunk_size": 256, "conv_kernel": 4,
        "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 8192,
        "layer_norm_epsilon": 1e-05, "n_groups": 8, "norm_before_gate": True, "num_heads": 128,
        "num_hidden_layers": 64, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "rms_norm": True, "state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_init_scheme": "random", "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0, "use_bias": False,
        "use_conv_bias": True, "vocab_size": 32768,
    },
    "Falcon 7B": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False,
        "apply_residual_connection_post_layernorm": False, "bias": False, "hidden_dropout": 0.0, "hidden_size": 4544,
        "layer_norm_epsilon": 1e-05, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "vocab_size": 65024,
    },
    "Mamba 130M": {
        "model_type": "mamba", "architectures": ["MambaForCausalLM"], "conv_kernel": 4, "d_inner": 1536,
        "d_model": 768, "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768,
        "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "n_layer": 24, "num_hidden_layers": 24,
        "pad_token_id": 0, "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "rms_norm": True, "ssm_cfg": {}, "state_size": 16, "time_step_floor": 0.0001,
        "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 48,
        "time_step_scale": 1.0, "use_bias": False, "use_conv_bias": True, "vocab_size": 50280,
    },
    "MPT 7B": {
        "model_type": "mpt", "architectures": ["MPTForCausalLM"], "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
            "qk_ln": False, "softmax_scale": None,
        },
        "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {
            "emb_init_std": None, "emb_init_uniform_lim": None, "fan_mode": "fan_in", "init_div_is_residual": True,
            "init_gain": 0, "init_nonlinearity": "relu", "init_std": 0.02, "name": "kaiming_normal_", "verbose": 0,
        },
        "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "n_heads": 32,
        "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0, "vocab_size": 50432,
    },
    "Falcon 2 11B": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "activation": "gelu", "alibi": False,
        "bias": False, "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_dropout": 0.0, "hidden_size": 4096,
        "layer_norm_epsilon": 1e-05, "max_position_embeddings": 8192, "multi_query": True,
        "new_decoder_architecture": True, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8,
        "num_ln_in_parallel_attn": 1, "parallel_attn": True, "rope_scaling": None, "rope_theta": 500042.0,
        "vocab_size": 65024,
    },
    "Galactica 1.3B": {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "_remove_final_layer_norm": False,
        "activation_function": "gelu", "do_layer_norm_before": True, "dropout": 0.1, "enable_bias": False,
        "ffn_dim": 8192, "hidden_size": 2048, "init_std": 0.02, "layer_norm_elementwise_affine": False,
        "layerdrop": 0.0, "learned_embeddings": True, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 24, "pad_token_id": 1, "scale_embeddings": False, "vocab_size": 50000,
        "word_embed_proj_dim": 2048,
    },
    "GPT": {
        "model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"], "afn": "gelu", "attn_pdrop": 0.1,
        "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 512, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
        "summary_first_dropout": 0.1, "summary_type": "cls_index", "vocab_size": 40478,
    },
    "CTRL": {
        "model_type": "ctrl", "attn_pdrop": 0.1, "dff": 8192, "embd_pdrop": 0.1, "finetuning_task": None,
        "from_tf": False, "layer_norm_epsilon": 1e-06, "n_ctx": 512, "n_embd": 1280, "n_head": 16, "n_layer": 48,
        "n_positions": 50000, "num_labels": 1, "pruned_heads": {}, "resid_pdrop": 0.1, "summary_first_dropout": 0.1,
        "summary_type": "cls_index", "torchscript": False, "use_bfloat16": False, "vocab_size": 246534,
    },
    "GPT-SW3 1.3B": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu",
        "apply_query_key_layer_scaling": True, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05,
        "n_embd": 2048, "n_head": 32, "n_inner": 8192, "n_layer": 24, "n_positions": 2048,
        "normalize_attention_scores": True, "pad_token_id": 0, "reorder_and_upcast_attn": False, "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "vocab_size": 64000,
    },
    "Polyglot-Ko 5.8B": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 4096,
        "intermediate_size": 16384, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_steps": "global_step320000", "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "vocab_size": 30080,
    },
    "h2oGPT 6.9B": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"],
        "custom_pipeline": {"text-generation": {"impl": "h2oai_pipeline.H2OTextGenerationPipeline",
                                                "pt": "AutoModelForCausalLM"}},
        "hidden_act": "gelu", "hidden_size": 4096, "intermediate_size": 16384, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50432,
    },
    "Persimmon 8B": {
        "model_type": "persimmon", "architectures": ["PersimmonForCausalLM"], "hidden_act": "relu2",
        "hidden_dropout": 0.0, "hidden_size": 4096, "intermediate_size": 16384, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 16384, "num_attention_heads": 64, "num_hidden_layers": 36,
        "num_key_value_heads": 64, "qk_layernorm": True, "rope_scaling": None, "rope_theta": 25000.0,
        "tie_word_embeddings": False, "vocab_size": 262144,
    },
    "Nemotron Mini 4B": {
        "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "relu2", "hidden_dropout": 0.0, "hidden_size": 3072, "intermediate_size": 9216,
        "kv_channels": 128, "max_position_embeddings": 4096, "mlp_bias": False, "norm_eps": 1e-05,
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "rope_percent": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 256000,
    },
    "Hunyuan MT2 7B": {
        "model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"],
        "add_classification_head": False, "attention_bias": False, "attention_head_dim": 128, "cla_share_factor": 2,
        "class_num": 0, "dense_list": [4096, 0], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "intermediate_size": 14336, "mask_init_id": 12,
        "max_position_embeddings": 262144, "mlp_bias": False, "norm_type": "rms", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "org_vocab_size": 128167, "pad_id": 127961,
        "pad_token_id": 127961, "pool_type": "last", "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "type": "dynamic"},
        "rope_theta": 10000.0, "sep_token_id": 127962, "text_end_id": 7, "text_start_id": 6,
        "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True,
        "vocab_size": 128167,
    },
    "ERNIE 4.5 21B": {
        "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_ernie4_5_moe.Ernie4_5_MoeConfig"}, "hidden_act": "silu",
        "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
        "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000,
        "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
    },
    "dots.llm1": {
        "model_type": "dots1", "architectures": ["Dots1ForCausalLM"], "attention_bias": False,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
        "max_position_embeddings": 32768, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 128,
        "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
        "num_hidden_layers": 62, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc",
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "phi-1": {
        "model_type": "phi", "architectures": ["PhiForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi.PhiConfig"}, "embd_pdrop": 0.0, "hidden_act": "gelu_new",
        "hidden_size": 2048, "intermediate_size": 8192, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32, "partial_rotary_factor": 0.5,
        "qk_layernorm": False, "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 10000.0, "rotary_dim": 32,
        "tie_word_embeddings": False, "vocab_size": 50295,
    },
    "ALLaM 7B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "internal_version": "7b-alpha-v2.33.0.30", "max_position_embeddings": 4096, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "vocab_size": 64000,
    },
    "MobileLLM R1 950M": {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "attention_bias": False,
        "attention_chunk_size": 32768, "attn_scale": 0.1, "attn_temperature_tuning": False, "floor_scale": 8192,
        "for_llm_compressor": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1536,
        "interleave_moe_layer_step": 0, "intermediate_size": 6144, "intermediate_size_mlp": 6144,
        "layer_types": repeated("F", 22), "max_position_embeddings": 32768, "moe_layers": [],
        "no_rope_layers": [1] * 22, "num_attention_heads": 24, "num_experts_per_tok": 0, "num_hidden_layers": 22,
        "num_key_value_heads": 6, "num_local_experts": 0, "output_router_logits": False, "pad_token_id": 200018,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 8000000.0, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "tie_word_embeddings": True, "use_qk_norm": True, "vocab_size": 128256,
    },
    "Trinity Nano": {
        "model_type": "afmoe", "architectures": ["AfmoeForCausalLM"], "global_attn_every_n_layers": 4, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "layer_types": repeated("SSSF", 56),
        "load_balance_coeff": 0.001, "max_position_embeddings": 131072, "moe_intermediate_size": 256,
        "mup_enabled": True, "n_group": 1, "num_attention_heads": 8, "num_dense_layers": 2, "num_expert_groups": 1,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 56, "num_key_value_heads": 2,
        "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
        "tie_word_embeddings": False, "topk_group": 1, "use_grouped_mm": True, "vocab_size": 200192,
    },
}  # fmt: skip


def published(model: str) -> dict[str, Any]:
    return USUAL | PUBLISHED[model]
