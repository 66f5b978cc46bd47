"""Writes model folders of real models' shapes for random weights: config.json and a tokenizer, without weights.

The shape determines how many bytes a decode step reads, and thus its shortest possible time.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, __version__

from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.registry import build_model, read_config

END_OF_TEXT = "<|endoftext|>"

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


def _longer(factor: float) -> dict[str, Any]:
    """The RoPE settings of later models of the Llama 3 family."""
    return {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-1b": _LLAMA | _longer(32.0) | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": _QWEN3 | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": _LLAMA | _longer(8.0) | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "tiny": _LLAMA | _longer(8.0) | {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Llama 3.2 1B, Qwen3 4B, Llama 3.1 8B, Qwen3 30B A3B, and a tiny model for trying the benchmark."""


def write_model(shape: Mapping[str, Any], folder: Path) -> None:
    """Write config.json and a tokenizer with a text for every token id."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġw{number}" for number in range(shape["vocab_size"] - len(alphabet) - 1))
    vocabulary = {token: number for number, token in enumerate((END_OF_TEXT, *alphabet, *words))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT).save_pretrained(folder)
    written = {"bos_token_id": 0, "eos_token_id": 0, "transformers_version": __version__}
    (folder / "config.json").write_text(json.dumps(dict(shape) | written))


def step_bytes(shape: Mapping[str, Any], batch: int, context: float) -> float:
    """Minimum bytes that a decode step of `batch` sequences with `context` tokens each reads: weights, keys and values.

    bf16. Token embeddings count only if tied to the logits, and of experts the mean number that the step's tokens
    choose.
    """
    config = read_config(shape)
    assert isinstance(config, DecoderConfig)
    tensors = build_model(config, torch.bfloat16, torch.device("meta")).checkpoint_tensors()
    share = 1.0
    if "num_experts" in shape:
        share -= (1 - shape["num_experts_per_tok"] / shape["num_experts"]) ** batch
    read = sum(
        tensor.nbytes * (share if ".experts." in name else 1.0)
        for name, tensor in tensors.items()
        if shape["tie_word_embeddings"] or "embed" not in name
    )
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * torch.bfloat16.itemsize
    return read + batch * context * token_bytes
