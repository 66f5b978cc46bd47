"""A tiny random Gemma 3n with the names of published files. transformers builds the whole network with timm only."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_networks import randomize, save_tokenizer

TEXT: dict[str, Any] = {
    "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.0], "altup_active_idx": 0, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 3, "attention_bias": False,
    "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 12, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32, "hidden_size_per_layer_input": 6, "initializer_range": 0.02,
    "intermediate_size": [40, 40, 40, 40], "laurel_rank": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 128,
    "model_type": "gemma3n_text", "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "num_kv_shared_layers": 2, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 50.0,
    "rope_scaling": None, "rope_theta": 500.0, "sliding_window": 8, "torch_dtype": "float32", "use_cache": True,
    "vocab_size": 131, "vocab_size_per_layer_input": 120,
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "audio_soft_tokens_per_image": 188,
    "audio_token_id": 129, "boa_token_id": 126, "boi_token_id": 125, "eoa_token_id": 128, "eoi_token_id": 124,
    "eos_token_id": [1, 106], "image_token_id": 127, "initializer_range": 0.02, "torch_dtype": "float32",
    "transformers_version": "4.53.0.dev0", "vision_soft_tokens_per_image": 256,
    "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 16, "vocab_offset": 122, "vocab_size": 4},
    "text_config": TEXT,
    "vision_config": {
        "architecture": "mobilenetv5_300m_enc", "do_pooling": False, "hidden_size": 16, "label_names": ["LABEL_0"],
        "model_args": None, "model_type": "gemma3n_vision", "num_classes": 2, "rms_norm_eps": 1e-06,
        "vocab_offset": 118, "vocab_size": 4,
    },
}  # fmt: skip
_OTHERS = (
    "vision_tower.timm_model.conv_stem.conv.weight", "vision_tower.timm_model.msfa.norm.weight",
    "audio_tower.conformer.0.attention.attn.q_proj.weight", "audio_tower.subsample_conv_projection.conv_0.conv.weight",
    "embed_audio.embedding.weight", "embed_vision.embedding_projection.weight",
    "embed_vision.hard_embedding_norm.weight",
)  # fmt: skip
_SHARED = ("k_norm", "k_proj", "v_proj")
"""Modules of layers without keys of their own: published files have them, and transformers' network does not."""


def write_whole(whole: Path, text: Path) -> Path:
    """Write a published whole, and its text network as transformers saves it. Returns the first folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    network: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(TEXT))))
    randomize(network)
    network.save_pretrained(text)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for name, tensor in network.state_dict().items()
        if name != "lm_head.weight"
    }
    for name in _SHARED:
        tensors[f"model.language_model.layers.3.self_attn.{name}.weight"] = torch.ones(3)
    tensors |= {f"model.{name}": torch.ones(3) for name in _OTHERS}
    whole.mkdir()
    save_file(tensors, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps(WHOLE))
    for folder in (whole, text):
        save_tokenizer(folder)
    return whole
