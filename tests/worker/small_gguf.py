"""A small GGUF file, written by the library that others write theirs with."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

QUANTIZED = {
    "token_embd": "Q8_0",
    "attn_q": "Q8_0",
    "attn_k": "Q4_0",
    "attn_v": "Q5_0",
    "attn_output": "Q4_1",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_0",
}


def write_gguf(
    path: Path,
    change: Mapping[str, tuple[int, ...] | None] | None = None,
    quantized: Mapping[str, str] | None = None,
) -> None:
    """A random Llama of two layers with a tokenizer; `change` gives tensors another shape, or None to leave one out;
    `quantized` gives those of such names a type."""
    gguf = pytest.importorskip("gguf")
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(number) for number in range(0x100, 0x100 + 258)]
    writer.add_token_list([*letters, letters[0] + letters[1], "<|end|>"])
    writer.add_token_types([1] * 259 + [3])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(259)
    shapes: dict[str, tuple[int, ...] | None] = {"token_embd": (260, 32), "output_norm": (32,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (32,),
                "attn_q": (32, 32),
                "attn_k": (16, 32),
                "attn_v": (16, 32),
                "attn_output": (32, 32),
                "ffn_norm": (32,),
                "ffn_gate": (48, 32),
                "ffn_up": (48, 32),
                "ffn_down": (32, 48),
            }.items()
        }
    for name, shape in (shapes | dict(change or {})).items():
        if shape is not None:
            values = generator.standard_normal(shape).astype(np.float32)
            kind = gguf.GGMLQuantizationType[(quantized or {}).get(name.rpartition(".")[2], "F32")]
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
