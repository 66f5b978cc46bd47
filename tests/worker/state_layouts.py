"""The blocks of models with states, by their published sizes: `python tests/worker/state_layouts.py`.

`--write` writes the table of docs/models.md. Only shapes are computed, on torch's meta device.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worker_service.execution.cache.layer_groups import group_layers, page_bytes, unused_share
from worker_service.models.layer_needs import LayerNeeds, LayerStates, needs_of
from worker_service.models.registry import read_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"(<!-- table of states -->\n).*?(<!-- end of states -->\n)", re.DOTALL)
NUM_TOKENS = 8192
BLOCK_SIZE = 16
MODELS: Mapping[str, dict[str, Any]] = {
    "Qwen3-Next 80B": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "max_position_embeddings": 262_144,
    },
    "Qwen3.5 9B": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
        "max_position_embeddings": 262_144,
    },
    "Granite 4.0 H tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 40,
        "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4, "num_local_experts": 64,
        "num_experts_per_tok": 6, "max_position_embeddings": 131_072, "position_embedding_type": "nope",
        "layer_types": ["attention" if number in (5, 15, 25, 35) else "mamba" for number in range(40)],
    },
    "Nemotron-H 8B": {
        "model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4, "intermediate_size": 21_504, "max_position_embeddings": 8192,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
    },
    "Falcon-H1 7B": {
        "model_type": "falcon_h1", "hidden_size": 3072, "num_hidden_layers": 44, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
        "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4, "max_position_embeddings": 262_144,
    },
    "LFM2 350M": {
        "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 8, "conv_L_cache": 3, "max_position_embeddings": 128_000,
        "layer_types": ["full_attention" if number in (2, 5, 8, 10, 12, 14) else "conv" for number in range(16)],
    },
}  # fmt: skip


def needs(model: str) -> tuple[LayerNeeds, ...]:
    config: Any = read_config({"vocab_size": 1000} | MODELS[model])
    return needs_of(config, config.num_kv_heads)


def rows() -> Iterator[str]:
    yield (
        "| model | layers with keys | layers with states | groups with states | tokens of a block | MB of a block | "
        "unused |"
    )
    yield "|---|---|---|---|---|---|---|"
    for model in MODELS:
        layers = needs(model)
        groups = group_layers(layers, BLOCK_SIZE, 2**18, torch.bfloat16)
        with_states = [group for group in groups if not group.block_size]
        num_states = sum(isinstance(layer, LayerStates) for layer in layers)
        tokens = ", ".join(str(group.block_size) for group in groups if group.block_size)
        yield (
            f"| {model} | {len(layers) - num_states} | {num_states} | {len(with_states)} | {tokens} | "
            f"{page_bytes(groups) / 1e6:.2f} | {unused_share(groups, NUM_TOKENS):.1%} |"
        )


def main(arguments: Sequence[str]) -> None:
    table = "\n".join(rows()) + "\n"
    print(table)
    if "--write" in arguments:
        PAGE.write_text(TABLE.sub(lambda found: found[1] + table + found[2], PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
