"""Published config.json files of models that read images, shortened, say what their text networks are."""

from typing import Any

import pytest

from worker_service.models.config.text_part import text_part
from worker_service.models.images.config import ImageConfig
from worker_service.models.registry import read_config

SMOLVLM: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "image_token_id": 49190,
    "scale_factor": 4, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_reentrant_checkpoints": False, "vocab_size": 49280,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"], "model_type": "llama", "head_dim": 64, "hidden_size": 576,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
        "neftune_noise_alpha": 0.0, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 4, "qk_layer_norms": False,
        "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_theta": 100000, "use_resampler": False,
        "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "idefics3",
        "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
        "use_base_siglip": False,
    },
}  # fmt: skip
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100,
    "image_token_index": 32000, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "vocab_size": 32064,
    "text_config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-05, "vocab_size": 32064},
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
}  # fmt: skip
LLAVA_NEXT: dict[str, Any] = {
    **LLAVA, "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "use_image_newline_parameter": True, "tie_word_embeddings": False,
    "text_config": {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2", "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "torch_dtype": "bfloat16", "vocab_size": 32064,
    },
}  # fmt: skip
LLAVA_ONEVISION: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "llava_onevision",
    "image_grid_pinpoints": [[384, 384], [384, 768]], "image_token_index": 151646, "video_token_index": 151647,
    "projector_hidden_act": "gelu", "tie_word_embeddings": False, "torch_dtype": "float16",
    "use_image_newline_parameter": True, "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "text_config": {
        "_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896,
        "intermediate_size": 4864, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "vocab_size": 152000,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
    "mm_tokens_per_image": 256, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "audio_token_id": 258881,
    "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_id": 258883, "eoa_token_index": 258883,
    "eoi_token_id": 258882, "image_token_id": 258880, "video_token_id": 258884, "tie_word_embeddings": True,
    "vision_soft_tokens_per_image": 280, "audio_config": {"model_type": "gemma4_audio", "hidden_size": 1024},
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 5,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072, "pad_token_id": 0,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 512,
        "use_bidirectional_attention": None, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {
        "model_type": "gemma4_vision", "default_output_length": 280, "global_head_dim": 64, "head_dim": 64,
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 16, "num_key_value_heads": 12,
        "pooling_kernel_size": 3, "position_embedding_size": 10240, "standardize": False,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "use_clipped_linears": True,
    },
}  # fmt: skip
QWEN2_5_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
# Written without a copy of the published file, by transformers' converter.
QWEN3_VL_MOE: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "image_token_id": 151655,
    "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "use_cache": True, "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_vl_moe",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "json",
    [SMOLVLM, LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, QWEN2_5_VL, QWEN3_VL_MOE, GEMMA3, GEMMA4],
    ids=lambda json: json["model_type"],
)
def test_published_files_are_read(json: dict[str, Any]) -> None:
    text, config, images = json.get("text_config", json), read_config(json), ImageConfig.from_json(json)
    defaults = {"gemma3": 131_072, "llava_onevision": 32_768}
    assert config.max_model_len == text.get("max_position_embeddings", defaults.get(json["model_type"]))
    assert config.tied_embeddings == images.network.tie_word_embeddings
    assert config.hidden_size == text.get("hidden_size", 4096)
    assert images.network.vision_config.hidden_size == json["vision_config"]["hidden_size"]


@pytest.mark.parametrize(
    ("json", "reason"),
    [
        (SMOLVLM | {"text_config": SMOLVLM["text_config"] | {"use_resampler": True}}, "use_resampler = True"),
        (SMOLVLM | {"text_config": SMOLVLM["text_config"] | {"pixel_shuffle_factor": 2}}, "pixel_shuffle_factor = 2"),
        (
            LLAVA | {"text_config": LLAVA["text_config"] | {"model_type": "t5"}},
            "whose text network is 't5' is not supported",
        ),
        (LLAVA_NEXT | {"use_image_newline_parameter": False}, "use_image_newline_parameter = False"),
        (QWEN2_5_VL | {"odd": 1}, "odd = 1"),
        (GEMMA3 | {"text_config": {"model_type": []}}, r"text_config.model_type is \[\]; it must be the name"),
        (
            QWEN3_VL_MOE | {"text_config": QWEN3_VL_MOE["text_config"] | {"norm_topk_prob": False}},
            "norm_topk_prob = False",
        ),
    ],
    ids=str,
)
def test_what_text_networks_do_not_read_is_refused(json: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_config(json)


@pytest.mark.parametrize(("name", "value"), [("spatial_patch_size", 7), ("odd", 1)])
def test_what_networks_for_images_do_not_read_is_refused(name: str, value: int) -> None:
    json = QWEN2_5_VL | {"vision_config": QWEN2_5_VL["vision_config"] | {name: value}}
    assert text_part(json)["model_type"] == "qwen2_5_vl_text"  # texts do not need it
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        ImageConfig.from_json(json)


@pytest.mark.parametrize("layers", [0, 27, -28, [], [-28, -1]], ids=str)
def test_a_layer_that_the_network_for_images_does_not_have_is_refused(layers: object) -> None:
    with pytest.raises(ValueError, match="it must be a number from -27 to 26 except 0, or"):
        ImageConfig.from_json(LLAVA_ONEVISION | {"vision_feature_layer": layers})
    assert ImageConfig.from_json(LLAVA_ONEVISION | {"vision_feature_layer": [0, -27, 26]})


def test_a_type_of_the_network_for_images_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vision_config.model_type is \[\]; it must be a text"):
        ImageConfig.from_json(GEMMA4 | {"vision_config": GEMMA4["vision_config"] | {"model_type": []}})


def test_a_number_that_no_float_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vision_config.rms_norm_eps is 1000.*; it must be a finite number"):
        ImageConfig.from_json(GEMMA4 | {"vision_config": GEMMA4["vision_config"] | {"rms_norm_eps": 10**400}})


@pytest.mark.parametrize(
    ("json", "change", "reason"),
    [
        (GEMMA3, {"num_attention_heads": -1}, "num_attention_heads is -1; it must be a whole number from 1 on"),
        (QWEN2_5_VL, {"num_heads": -1}, "num_heads is -1; it must be a whole number from 1 on"),
        (QWEN2_5_VL, {"num_heads": 3}, "num_heads is 3; it must divide the width, which is 1280"),
    ],
)
def test_heads_with_which_no_image_could_be_encoded_are_refused(
    json: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ImageConfig.from_json(json | {"vision_config": json["vision_config"] | change})
