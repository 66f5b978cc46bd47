"""Native families whose layers keep states: their files, and that nothing but a sequence's tokens changes a bit. Their
tokens are compared with transformers' in `test_architectures`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from network_with_states import NetworkWithStates
from stepped_worker import PROMPT
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig, LayerConfig
from worker_service.models.decoders.shard import part_of
from worker_service.models.registry import read_config
from worker_service.parallel.ranks import Ranks

CPU = torch.device("cpu")
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 18,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 20
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 20,
    "mamba_n_groups": 2,
    "mamba_expand": 3,
    "shared_intermediate_size": 44,
    "layer_types": ["mamba", "attention", "mamba"],
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "mamba_num_heads": 8,
    "mamba_head_dim": 18,
    "ssm_state_size": 20,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 20,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"model_type": "granitemoehybrid", **MAMBA, "num_local_experts": 5, "mamba_proj_bias": True},
    "granitemoehybrid, dense": {
        "model_type": "granitemoehybrid",
        **MAMBA,
        "num_local_experts": 0,
        "mamba_conv_bias": False,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 8,
        "conv_bias": True,
    },
    "lfm2, convolutions of 4": {
        "model_type": "lfm2",
        "full_attn_idxs": [2],
        "layer_types": None,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 28,
        "routed_scaling_factor": 1.5,
    },
    "nemotron_h": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "num_hidden_layers": 5,
        "use_bias": True,
        "mlp_bias": True,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "nemotron_h, experts of latents": {
        **NEMOTRON,
        "layers_block_type": ["moe", "linear_attention", "full_attention"],
        "moe_latent_size": 16,
        "use_conv_bias": False,
        "norm_topk_prob": False,
        "time_step_min": 0.5,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **DELTA, "attention_bias": True},
    # With 5 experts, one row of these random weights amplifies rounding tenfold.
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **DELTA, **EXPERTS, "num_experts": 4},
    "qwen3_next": {"model_type": "qwen3_next", **DELTA, **EXPERTS},
    "qwen3_next, dense layers between": {
        "model_type": "qwen3_next",
        **DELTA,
        **EXPERTS,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
}


def load(path: Path, dtype: torch.dtype) -> NetworkWithStates:
    checkpoint = Checkpoint(path)
    config = read_config(checkpoint.config)
    assert isinstance(config, DecoderConfig)
    model = Decoder(config.untied(checkpoint.own(config.tied)), dtype, CPU)
    places = model.checkpoint_tensors()
    checkpoint.load_into(places)
    checkpoint.check_none_left({*places, *config.tied}, config.ignored_tensors)
    model.pack()
    return NetworkWithStates(model, dtype)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(**FAMILIES[request.param])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_chunks_nor_batches_change_a_bit(checkpoint: Path, dtype: torch.dtype) -> None:
    network = load(checkpoint, dtype)
    (whole,) = network((0, PROMPT, 0))
    parts: list[Tensor] = []
    for size in (5, 1, 17, 1, 1, 12):
        done = sum(map(len, parts))
        other = (2, PROMPT[:done], 0) if done % 2 else (2, PROMPT[9:12], 0)
        parts.append(network(other, (1, PROMPT[done : done + size], done))[1])
    assert torch.equal(torch.cat(parts), whole)
    for layer in network.layers:
        if isinstance(layer.blocks, tuple):
            assert all(torch.equal(state[0], state[1]) for state in layer.blocks)


PLAIN: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 7, "initializer_range": 0.02, "use_cache": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "vocab_size": 500, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup",
    "intermediate_size": 32, "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 6,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False,
    "normalization_function": "rmsnorm", "num_experts_per_tok": 6, "num_local_experts": 64,
    "output_router_logits": False, "pad_token_id": 3, "position_embedding_type": "nope", "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 48, "tie_word_embeddings": True,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 64,
    "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 8,
    "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64, "conv_use_xavier_init": True,
    "layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 1e-05, "num_heads": 4, "pad_token_id": 0,
    "rope_theta": 1000000.0, "use_pos_enc": True,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "attention_bias": False, "head_dim": 16, "hidden_act": "silu", "intermediate_size": 96,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 16, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
}  # fmt: skip
NVIDIA: dict[str, Any] = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "chunk_size": 128,
    "conv_kernel": 4, "expand": 2, "head_dim": 16, "hidden_dropout": 0.0, "intermediate_size": 96,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 8,
    "mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 2, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None,
    "ssm_state_size": 16, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": False,
    "use_conv_bias": True, "use_mamba_kernels": True,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Granite 4.0 H Tiny": GRANITE,
    "Granite 4.0 Micro": GRANITE | {
        "layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0,
        "position_embedding_type": "rope", "mamba_n_heads": 128,
    },
    "LFM2 350M": LFM2,
    "LFM2 8B-A1B": {
        "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False,
        "intermediate_size": 96, "layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 1e-05,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts": 32,
        "num_experts_per_tok": 4, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": True,
        "pad_token_id": 0,
    },
    "Nemotron-H 8B": NVIDIA | {"hybrid_override_pattern": "M-M*", "rms_norm_eps": 1e-05, "time_step_rank": 256},
    "Nemotron 3 Nano": NVIDIA | {
        "hybrid_override_pattern": "MEM*", "mamba_ssm_cache_dtype": "float32", "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 32, "n_group": 1, "n_routed_experts": 16, "n_shared_experts": 1,
        "norm_eps": 1e-05, "norm_topk_prob": True, "num_experts_per_tok": 6, "partial_rotary_factor": 1.0,
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 1,
    },
    "Qwen3-Next 80B-A3B": QWEN | {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1,
        "full_attention_interval": 4, "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True,
        "num_experts": 16, "num_experts_per_tok": 10, "output_router_logits": False, "partial_rotary_factor": 0.25,
        "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 32, "use_sliding_window": False,
    },
    "Qwen3.5 9B's text": QWEN | {
        "model_type": "qwen3_5_text", "attn_output_gate": True, "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                            "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
KINDS = {
    "Nemotron-H 8B": "s-sa", "Nemotron 3 Nano": "sesa",
    "Granite 4.0 H Tiny": "ssas", "Granite 4.0 Micro": "aaaa", "LFM2 350M": "ssas", "LFM2 8B-A1B": "ssas",
    "Qwen3-Next 80B-A3B": "sssa", "Qwen3.5 9B's text": "sssa",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_as_they_are_published_are_read(name: str) -> None:
    config = read_config(PLAIN | PUBLISHED[name])
    assert isinstance(config, DecoderConfig)
    assert "".join(kind_of(layer) for layer in config.layers) == KINDS[name]


def kind_of(layer: LayerConfig) -> str:
    if layer.attends:
        return "a" if layer.mixer is None else "s"
    return "-" if layer.mixture is None else "e"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (GRANITE | {"mamba_d_head": 20}, "mamba_n_heads is 8, with mamba_d_head 20; .* hidden_size, 128"),
        (GRANITE | {"mamba_n_groups": 3}, "Mamba-2 has 8 heads; the number of groups, 3, must divide it"),
        (GRANITE | {"time_step_limit": [0.0, 0.1]}, r"it says time_step_limit = \[0.0, 0.1\]"),
        (GRANITE | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu"),
        (GRANITE | {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; it must be nope or rope"),
        (NVIDIA | {"hybrid_override_pattern": "M-X*"}, "is 'M-X\\*'; it must be letters of M, \\*, - and E"),
        (
            NVIDIA | {"hybrid_override_pattern": "-**-"},
            "there are 4 layers; there must be at most 512, and one of Mamba-2",
        ),
        (NVIDIA | {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; it must be relu2"),
        (NVIDIA | {"num_hidden_layers": 5}, "num_hidden_layers is 5, and .* says 4 layers"),
        (LFM2 | {"conv_L_cache": 1}, "conv_L_cache is 1; it must be a whole number from 2"),
        (LFM2 | {"conv_dim": 32}, "it says conv_dim = 32"),
        (LFM2 | {"rms_norm_eps": 0.1}, "it says rms_norm_eps = 0.1"),
        (PUBLISHED["Qwen3-Next 80B-A3B"] | {"linear_num_value_heads": 3}, "linear_num_key_heads 2, which must divide"),
        (PUBLISHED["Qwen3.5 9B's text"] | {"attn_output_gate": False}, "it says attn_output_gate = False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_obeyed_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_config(PLAIN | change)


def test_layers_with_states_are_not_split_over_ranks() -> None:
    with pytest.raises(StartError, match="--tensor-parallel-size is for networks without states"):
        part_of(read_config(PLAIN | LFM2), Ranks(0, 2))
