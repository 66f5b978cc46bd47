"""Small GGUF files, written by the usual library."""

import contextlib
import io
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from worker_service.loading.gguf import conversion as gguf_conversion

QUANTIZED = {
    "token_embd": "Q8_0",
    "attn_q": "Q8_0",
    "attn_k": "Q4_0",
    "attn_v": "Q5_0",
    "attn_output": "Q4_1",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_0",
}
HEADS, KV_HEADS, HEAD, HIDDEN, INNER, EXPERTS = 4, 2, 8, 32, 48, 4
NUM_TOKENS = 260
NUM_LAYERS = {"gemma3": 6, "smollm3": 4}
"""Families with unlike layers; others have 2."""
LETTERS = [chr(number) for number in range(0x100, 0x100 + 258)]


def convert_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Saves two seconds of imports; test_repository_code.py starts a true conversion."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", gguf_conversion.__name__]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                gguf_conversion._main(Path(command[3]), Path(command[4]))
        except SystemExit as end:
            return subprocess.CompletedProcess(command, int(end.code or 0), "", said.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")

    patch.setattr(gguf_conversion.subprocess, "run", run)


def number_of_layers(architecture: str) -> int:
    return NUM_LAYERS.get(architecture, 2)


def keys_of(architecture: str, layers: int, head: int) -> dict[str, Any]:
    """Keys of a model without experts, and of its tokenizer."""
    own = {
        "context_length": 64,
        "block_count": layers,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "vocab_size": NUM_TOKENS,
    }
    tokenizer = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*LETTERS, LETTERS[0] + LETTERS[1], "<|end|>"],
        "token_type": [1] * 259 + [3],
        "merges": [f"{LETTERS[0]} {LETTERS[1]}"],
        "bos_token_id": 259,
        "eos_token_id": 259,
    }
    return {f"{architecture}.{key}": value for key, value in own.items()} | {
        f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()
    }


def shapes_of(architecture: str, layers: int, head: int, experts: bool) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name without .weight."""
    query, key = HEADS * head, KV_HEADS * head
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    layer: dict[str, tuple[int, ...]] = {}
    if architecture == "phi3":
        layer = {"attn_qkv": (query + 2 * key, HIDDEN), "ffn_up": (2 * INNER, HIDDEN)}
    else:
        layer = {"attn_q": (query, HIDDEN), "attn_k": (key, HIDDEN), "attn_v": (key, HIDDEN)}
        layer |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    layer |= {"attn_output": (HIDDEN, query), "ffn_down": (HIDDEN, INNER)}
    if architecture in ("gemma2", "gemma3"):
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
    if architecture in ("gemma3", "qwen3", "qwen3moe"):
        norms |= {"attn_q_norm": head, "attn_k_norm": head}
    if experts:
        for name in ("gate", "up", "down"):
            layer[f"ffn_{name}_exps"] = (EXPERTS, *layer.pop(f"ffn_{name}"))
        layer["ffn_gate_inp"] = (EXPERTS, HIDDEN)
    layer |= {name: (size,) for name, size in norms.items()}
    of_layers = {f"blk.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}
    return {"token_embd": (NUM_TOKENS, HIDDEN), "output_norm": (HIDDEN,)} | of_layers


def draw_weights(shape: tuple[int, ...], name: str) -> npt.NDArray[np.float32]:
    """Numbers that bfloat16 represents, seeded by the name; a norm's are around 1."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    if len(shape) == 1:
        return (1 + generator.integers(-16, 17, shape) / 64).astype(np.float32)
    return (generator.integers(-127, 128, shape) / 128).astype(np.float32)


def write_gguf(
    path: Path,
    change: Mapping[str, tuple[int, ...] | None] | None = None,
    quantized: Mapping[str, str] | None = None,
    keys: Mapping[str, Any] | None = None,
    equal_layers: bool = False,
    architecture: str = "llama",
    experts: bool = False,
    more: Mapping[str, npt.ArrayLike] | None = None,
    parts: int = 1,
    layers: int | None = None,
    head: int = HEAD,
) -> None:
    """A random model with a tokenizer. `change`: another shape, or None to leave a tensor out. `quantized`: types by
    name. `keys`: added, or left out if None. `more`: further tensors. `parts`: a split model; the path is the first
    part's.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    layers = layers or number_of_layers(architecture)
    all_keys = keys_of(architecture, layers, head) | dict(keys or {})
    shapes = shapes_of(architecture, layers, head, experts) | dict(change or {})
    writers = [writer]
    if parts > 1:
        name = path.name.removesuffix(f"-00001-of-{parts:05}.gguf")
        others = [path.with_name(f"{name}-{number + 1:05}-of-{parts:05}.gguf") for number in range(1, parts)]
        writers += [gguf.GGUFWriter(other, architecture) for other in others]
        for number, of_part in enumerate(writers):
            of_part.add_uint16("split.no", number)
            of_part.add_uint16("split.count", parts)
            of_part.add_int32("split.tensors.count", sum(shape is not None for shape in shapes.values()))
    for key, value in all_keys.items():
        if value is not None:
            add_key(writer, key, value)
    for number, (name, shape) in enumerate(shapes.items()):
        if shape is not None:
            part = name.rpartition(".")[2]
            kind = gguf.GGMLQuantizationType[(quantized or {}).get(part, "F32")]
            values = gguf.quants.quantize(draw_weights(shape, part if equal_layers else name), kind)
            writers[number % parts].add_tensor(f"{name}.weight", values, raw_dtype=kind)
    for name, values in (more or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    for of_part in writers:
        of_part.write_header_to_file()
        of_part.write_kv_data_to_file()
        of_part.write_tensors_to_file()
        of_part.close()


def add_key(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
