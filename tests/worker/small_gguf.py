"""A small GGUF file, written by the library that others write theirs with."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worker_service.loading import gguf_conversion

QUANTIZED = {
    "token_embd": "Q8_0",
    "attn_q": "Q8_0",
    "attn_k": "Q4_0",
    "attn_v": "Q5_0",
    "attn_output": "Q4_1",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_0",
}


def convert_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """It has the imports, which take five seconds; test_repository_code.py starts a true conversion."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", gguf_conversion.__name__]
        try:
            gguf_conversion._main(Path(command[3]), Path(command[4]))
        except SystemExit as end:
            return subprocess.CompletedProcess(command, 1, "", str(end))
        return subprocess.CompletedProcess(command, 0, "", "")

    patch.setattr(gguf_conversion.subprocess, "run", run)


def write_gguf(
    path: Path,
    change: Mapping[str, tuple[int, ...] | None] | None = None,
    quantized: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    equal_layers: bool = False,
) -> None:
    """A random Llama of two layers with a tokenizer; `change` gives tensors another shape, or None to leave one out;
    `quantized` gives those of such names a type; `sizes` are what the file says of itself in place of the truth."""
    gguf = pytest.importorskip("gguf")
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    said = {"block_count": 2, "embedding_length": 32, "feed_forward_length": 48, "attention.head_count": 4}
    for name, size in (said | dict(sizes or {})).items():
        writer.add_uint32(f"llama.{name}", size)
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
    drawn: dict[str, Any] = {}
    for name, shape in (shapes | dict(change or {})).items():
        if shape is not None:
            part = name.rpartition(".")[2]
            kind = gguf.GGMLQuantizationType[(quantized or {}).get(part, "F32")]
            values = drawn.get(part) if equal_layers else None
            if values is None:
                values = drawn[part] = generator.standard_normal(shape).astype(np.float32)
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
