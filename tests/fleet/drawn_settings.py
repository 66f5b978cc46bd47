"""Models, and random hostile settings: everything is small, shared and reused."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from drawn_requests import IMAGE_TOKENS, MAX_OUTPUTS, Asked, Kind
from tiny_adapters import write_three
from tiny_encoder_decoder import write_encoder_decoder
from tiny_image_models import make_model
from tiny_model import write_byte_tokenizer, write_tiny_llama

WINDOW = 24
"""Tokens that a layer with a sliding window sees."""

MAX_ENCODER_TOKENS = 264


def _llama(folder: Path) -> None:
    write_byte_tokenizer(folder.with_name("bytes"))
    write_tiny_llama(folder, folder.with_name("bytes"))
    write_three(folder.with_name("adapters"))


def _network(model_type: str, folder: Path, **values: object) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_byte_tokenizer(folder)
    torch.manual_seed(1)
    sizes = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes | heads | tokens | {"initializer_range": 0.2} | values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
NETWORKS: Mapping[str, tuple[str, dict[str, object]]] = {
    "window": ("mistral", {"sliding_window": WINDOW}),
    "windows": ("gemma3_text", _WINDOWS),
    "sinks": ("gpt_oss", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "chunks": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0, 1],
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
        },
    ),
    "heads of two sizes": ("gemma4_text", {**_WINDOWS, "global_head_dim": 32, "hidden_size_per_layer_input": 0}),
    "latents": (
        "deepseek_v3",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "states": (
        "qwen3_next",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
"""Types of transformers, and values of their configurations."""


def _images(family: str, folder: Path) -> None:
    folder.mkdir()
    make_model(folder, family)


@dataclass(frozen=True)
class Model:
    """The model, and its number of processes, which changes sums."""

    name: str
    write: Callable[[Path], object]
    kind: Kind
    dtypes: Sequence[str] = ("float32", "bfloat16")
    num_ranks: int = 1
    blocks_each: int = 1
    """Blocks of all groups of layers for a block's tokens, at most."""
    has_groups: bool = False
    """Whether the worker refuses --disable-hybrid-kv-cache-manager for this model."""
    has_states: bool = False


def _model(name: str, **options: Any) -> Model:
    model_type, values = NETWORKS[name]
    return Model(name, partial(_network, model_type, **values), Kind(has_adapters=False), **options)


MODELS = (
    Model("llama", _llama, Kind()),
    _model("window"),
    Model("llama", _llama, Kind(has_forms=False, has_adapters=False), ("float32",), num_ranks=2),
    Model(
        "t5",
        lambda folder: write_encoder_decoder(folder, "t5"),
        Kind(has_forms=False, has_encoder=True, has_vectors=False, has_adapters=False),
        ("float32",),
    ),
    Model(
        "bart",
        lambda folder: write_encoder_decoder(folder, "bart"),
        Kind(has_forms=False, has_encoder=True, has_vectors=False, has_adapters=False),
        ("float32",),
    ),
    *(_model(name, blocks_each=3) for name in ("windows", "sinks", "chunks")),
    _model("heads of two sizes", blocks_each=3, has_groups=True),
    _model("latents"),
    _model("states", has_groups=True, has_states=True),
    *(
        Model(
            f"images-of-{family}",
            partial(_images, family),
            Kind(has_forms=False, has_vectors=False, has_adapters=False, has_images=True),
        )
        for family in ("qwen2_5_vl", "smolvlm", "gemma3")
    ),
)
WEIGHTS = (6, 2, 1, 1, 1, 3, 2, 2, 2, 2, 4, 2, 2, 2)
"""Weights of MODELS in draws."""


@dataclass(frozen=True)
class Settings:
    worker: tuple[str, ...]
    scheduler: tuple[str, ...]
    num_workers: int
    guesses: bool
    has_priorities: bool


def flags_of(model: Model, dtype: str) -> tuple[str, ...]:
    """Flags of every worker of this model."""
    form = "--forms" if model.kind.has_forms else "--no-forms"
    ranks = ("--tensor-parallel-size", str(model.num_ranks)) if model.num_ranks > 1 else ()
    return ("--device", "cpu", "--dtype", dtype, "--threads", "1", form, *ranks)


def roomy(model: Model, dtype: str, adapters: Path) -> Settings:
    """Nothing is short, shared or drafted."""
    sizes = ("--num-gpu-blocks-override", "1024", "--block-size", "16", "--swap-space", "0")
    if not model.has_groups:  # alone, all layers keep the whole context
        sizes = (*sizes, "--disable-hybrid-kv-cache-manager")
    worker = (*flags_of(model, dtype), *sizes, *(("--max-loras", "4") if model.kind.has_adapters else ()))
    scheduler = ("--no-prefix-caching", *_adapters(model, adapters))
    return Settings(worker, scheduler, 1, guesses=False, has_priorities=False)


def draw_settings(draw: Random, model: Model, dtype: str, adapters: Path, asked: Sequence[Asked]) -> Settings:
    """Pools with room for the largest request, and for little besides."""
    may_guess = not (model.kind.has_encoder or model.has_states) and model.num_ranks == 1
    guesses = may_guess and draw.random() < 0.4
    lookahead = draw.choice([1, 3, 8]) if guesses else 0
    block_size = draw.choice([1, 4, 8, 8, 16])
    largest = max(one.num_blocks(block_size, lookahead) for one in asked)
    num_blocks = int(largest * model.blocks_each * draw.choice([1.1, 1.3, 2.0])) + 2
    if model.kind.has_encoder:  # for the longest input that an encoder may have, room is kept
        num_blocks += MAX_ENCODER_TOKENS // block_size + 3
    if model.has_states:  # of each output, in one or two groups
        num_blocks += MAX_OUTPUTS
    policy = draw.choice(["fcfs", "priority", "fair"])
    worker = [
        *flags_of(model, dtype),
        *("--block-size", str(block_size), "--num-gpu-blocks-override", str(num_blocks)),
        *("--max-num-seqs", str(draw.choice([MAX_OUTPUTS, 2 * MAX_OUTPUTS, 32]))),
        *("--max-num-batched-tokens", str(draw.choice([128, 256] if model.kind.has_encoder else [16, 32, 64, 256]))),
        *("--swap-space", draw.choice(["0", "0.0001", "0.002"])),
    ]
    if guesses:
        config = {"method": "ngram", "num_speculative_tokens": lookahead}
        worker += ["--speculative-config", json.dumps(config)]
    if model.kind.has_images:
        worker += ["--encoder-cache-size", str(IMAGE_TOKENS * draw.choice([1, 1, 3]))]
        worker += ["--encoder-budget", str(draw.choice([0, 20, 200]))]
    if model.kind.has_adapters:
        worker += ["--max-loras", str(draw.randint(1, 3)), "--max-cpu-loras", str(draw.choice([3, 8]))]
    scheduler = [
        *("--scheduling-policy", policy, "--priority-aging", str(draw.choice([1, 4, 64]))),
        *("--phase-rule", phase := draw.choice(["chunked", "separate"])),
        *("--preemption-mode", draw.choice(["recompute", "swap", "auto"])),
        *("--max-in-flight-steps", str(draw.randint(1, 3))),
        *("--long-prefill-token-threshold", str(draw.choice([0, 4, 32]))),
        *("--watermark", draw.choice(["0", "0.01", "0.05"])),
        *("--frontends", str(draw.randint(1, 2))),
        *("--health-interval", "0.5", "--no-worker-timeout", "600"),
        *_adapters(model, adapters),
    ]
    if policy == "fair":
        scheduler += ["--tenant-weights", '{"gold": 3, "iron": 0.5}']
    if phase == "separate":
        scheduler += ["--delay-factor", draw.choice(["0", "1"])]
    if draw.random() < 0.25:
        scheduler.append("--no-prefix-caching")
    return Settings(tuple(worker), tuple(scheduler), draw.randint(1, 3), guesses, policy == "priority")


def _adapters(model: Model, adapters: Path) -> tuple[str, ...]:
    if not model.kind.has_adapters:
        return ()
    return ("--lora-modules", ",".join(f"{name}={adapters / name}" for name in ("one", "two", "three")))
