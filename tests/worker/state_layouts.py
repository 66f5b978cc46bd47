"""The blocks of published models whose layers need several kinds of cache: `python tests/worker/state_layouts.py`.

`--write` writes the table of docs/models.md; tests/worker/models/test_model_table.py compares it. Only shapes are
computed, on torch's meta device.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from published_configs import published

from worker_service.execution.cache.layer_groups import LayerGroup, group_layers, page_bytes
from worker_service.models.layer_needs import LayerKeys, LayerNeeds, needs_of
from worker_service.models.registry import read_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"(<!-- table of blocks -->\n)(.*?)(<!-- end of blocks -->\n)", re.DOTALL)
HEAD = (
    "| model | layers with keys | layers with states | groups with states | tokens of a block | MB of a block |"
    " unused |\n"
    "|---|---|---|---|---|---|---|\n"
)
NUM_TOKENS = 8192
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
MODELS = (
    "gpt-oss 20B", "Gemma 2 2B", "Gemma 3 4B", "Gemma 3n E4B", "Gemma 4 26B", "Gemma 4 31B", "Llama 4 Scout",
    "Olmo 3.1 32B", "MiMo V2 Flash", "MiniCPM3 4B", "Kimi Linear 48B", "Qwen3 Next 80B", "Qwen3.5 9B",
    "Qwen3.5 35B", "Qwen3.6 27B", "Granite 4.0 H 350M", "Granite 4.0 H tiny", "Granite 4.0 H small",
    "Nemotron-H 8B", "Nemotron-H 56B", "Nemotron Nano v2 9B", "Nemotron 3 Nano", "Nemotron 3 Super",
    "Nemotron 3 Ultra", "Falcon-H1 0.5B", "Falcon-H1 7B", "Bamba 9B", "Zamba2 7B", "Jamba v0.1", "LFM2 350M",
    "LFM2 8B",
)  # fmt: skip


def zeros(config: Any) -> float:
    """Share of zeros in keys and values: in transformers' code, zeros fill up values that are smaller than keys."""
    value_dim = getattr(getattr(config, "network", None), "v_head_dim", None) or config.head_dim
    return (config.head_dim - value_dim) / (2 * config.head_dim) if config.head_dim else 0.0


def unused(layers: Sequence[LayerNeeds], groups: Sequence[LayerGroup], num_tokens: int, share_of_zeros: float) -> float:
    """Share of unused bytes in the blocks of one sequence. Without groups, blocks have no unused bytes but zeros."""
    if not groups:
        return share_of_zeros
    used = 0.0
    for layer in layers:
        if isinstance(layer, LayerKeys):
            kept = min(num_tokens, layer.window or num_tokens)
            used += layer.token_bytes(DTYPE) * kept * (1 - share_of_zeros)
        else:
            used += layer.num_bytes(DTYPE)
    blocks = (
        -(-min(num_tokens, group.window or num_tokens) // group.block_size) if group.block_size else 1
        for group in groups
    )
    return 1 - used / (page_bytes(groups) * sum(blocks))


def row(model: str) -> str:
    config: Any = read_config(published(model))
    layers, longest = needs_of(config, config.num_kv_heads), config.max_model_len
    groups = group_layers(layers, BLOCK_SIZE, longest, DTYPE)
    with_keys = [layer for layer in layers if isinstance(layer, LayerKeys)]
    with_states = [group for group in groups if not group.block_size]
    tokens = ", ".join(str(group.block_size) for group in groups if group.block_size) or BLOCK_SIZE
    page = page_bytes(groups) if groups else BLOCK_SIZE * sum(layer.token_bytes(DTYPE) for layer in with_keys)
    share = unused(layers, groups, min(NUM_TOKENS, longest), zeros(config))
    return (
        f"| {model} | {len(with_keys)} | {len(layers) - len(with_keys)} | {len(with_states)} | {tokens} | "
        f"{page / 1e6:.2f} | {share:.1%} |\n"
    )


def main(arguments: Sequence[str]) -> None:
    table = HEAD + "".join(map(row, MODELS))
    print(table)
    if "--write" in arguments:
        PAGE.write_text(TABLE.sub(lambda found: found[1] + table + found[3], PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
