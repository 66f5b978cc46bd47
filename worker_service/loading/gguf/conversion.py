"""Converts a GGUF file to a Hugging Face directory with bfloat16 safetensors; quantised weights are also copied. The
conversion runs in a process of its own: a malformed file may crash the tokenizers library, and the 300 MB for a
vocabulary of 262,144 tokens are returned at its end. Unused keys and tensors are refused."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagewire_common.processes.child_process import end_with_the_parent
from pagewire_common.start_error import StartError
from worker_service.loading.files.safetensors_writer import WrittenTensor, write_safetensors
from worker_service.loading.gguf.blocks import FILE, TYPES
from worker_service.loading.gguf.config import read_network
from worker_service.loading.gguf.file import GgufFile, find_parts, read_gguf
from worker_service.loading.gguf.header import GgufTensor
from worker_service.loading.gguf.keys import GgufKeys
from worker_service.loading.gguf.kinds import TEXT, WHOLE
from worker_service.loading.gguf.rope import FREQS, LONG, SHORT
from worker_service.loading.gguf.sampling import read_sampling
from worker_service.loading.gguf.tensors import Target, map_tensors
from worker_service.wording import named, reason, shown

VERSION = 5
"""Increased with every change of the conversion's results, so that older folders are not used."""
_REFUSED = 2
"""Exit status of a process that printed why it refused the file."""
_PIECE_ELEMENTS = 1 << 21
_POSITIONS = {"llama": (FREQS, LONG, SHORT), "phi3": (LONG, SHORT)}
"""GGUF tensors with divisors of rotary angles, by architecture."""
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_MAX_SHOWN = 8

Floats = npt.NDArray[np.float32]


def convert_gguf(file: Path, folder: Path) -> None:
    """Fill an existing folder. `file`: the model's file or any of its parts. Raises StartError."""
    command = [sys.executable, "-m", __name__, str(file), str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode == 0:
        return
    last = (child.stderr.strip().splitlines() or [f"the conversion ended with status {child.returncode}"])[-1]
    raise StartError(last if child.returncode == _REFUSED else f"{file} cannot be converted from GGUF: {last}")


def _main(file: Path, folder: Path) -> None:
    try:
        _convert(read_gguf(find_parts(file)), folder)
    except StartError as error:
        refusal = str(error)
    except Exception as error:  # gguf and tokenizers may raise any error
        refusal = f"{file} cannot be converted from GGUF: {reason(error)}"
    else:
        return
    sys.stderr.write(f"{refusal}\n")
    sys.exit(_REFUSED)


def _convert(file: GgufFile, folder: Path) -> None:
    # Imported here, so that workers do not load the tokenizers library.
    from worker_service.loading.gguf.tokenizer import convert_tokenizer

    keys, tensors = GgufKeys(file.metadata), file.tensors
    if (kind := keys.get("general.type", TEXT)) not in (None, "model"):
        raise ValueError(f"its general.type is {shown(kind)}, not a model")
    if (embeddings := tensors.get("token_embd.weight")) is None:
        raise ValueError("it has no tensor token_embd.weight")
    vocabulary = embeddings.shape[-1] if embeddings.shape else 0
    names = _POSITIONS.get(keys.architecture, ())
    divisors = {name: _values(tensors[name]) for name in names if name in tensors}
    config = read_network(keys, tensors, divisors, vocabulary)
    targets = map_tensors(config, tensors)
    if left := sorted(tensors.keys() - {target.source for target in targets.values()} - divisors.keys()):
        listed = ", ".join(map(named, left[:_MAX_SHOWN]))
        more = f" and {len(left) - _MAX_SHOWN} more" if len(left) > _MAX_SHOWN else ""
        raise ValueError(f"the architecture {keys.architecture} does not use its tensor {listed}{more}")
    ids = convert_tokenizer(keys, vocabulary, folder)
    token_ids = {"bos_token_id": ids.bos, "eos_token_id": list(ids.ends), "pad_token_id": ids.pad}
    _write_json(folder / "config.json", config | token_ids)
    _write_json(folder / "generation_config.json", token_ids | read_sampling(keys))
    _write_pooling(keys, folder)
    keys.refuse_leftovers()
    _write_weights(targets, tensors, folder)


def _write_weights(targets: Mapping[str, Target], tensors: Mapping[str, GgufTensor], folder: Path) -> None:
    widened = {
        name: WrittenTensor("BF16", target.shape, _widened(target, tensors.get(target.source or "")))
        for name, target in targets.items()
    }
    write_safetensors(folder / "model.safetensors", widened, {"format": "pt"})
    blocks: dict[str, WrittenTensor] = {}
    types: dict[str, str] = {}
    for name, target in targets.items():
        tensor = tensors.get(target.source or "")
        if tensor is not None and tensor.type_name in TYPES and len(target.shape) == 2:
            shape = (target.shape[0], tensor.row_bytes)
            blocks[name] = WrittenTensor("U8", shape, (rows.data for rows in _rows(target, tensor)))
            types[name] = tensor.type_name
    if blocks:
        write_safetensors(folder / FILE, blocks, types)


def _widened(target: Target, tensor: GgufTensor | None) -> Iterator[memoryview]:
    if tensor is None:
        yield memoryview(bytes(2 * target.shape[0]))
        return
    for rows in _rows(target, tensor):
        values = _dequantized(rows, tensor.type_name)
        if len(target.shape) == 1:  # a bias or a norm is one row
            values = values.reshape(-1)
            if target.heads:
                values = values[_order(len(values), target.heads)]
            values = values - np.float32(target.added)
        yield (
            torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
            .bfloat16()
            .view(torch.uint8)
            .numpy()
            .reshape(-1)
            .data
        )


def _rows(target: Target, tensor: GgufTensor) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield arrays with the bytes of several rows, in the order of the Hugging Face checkpoint."""
    count = target.shape[0] if len(target.shape) == 2 else 1
    together = count // target.heads if target.heads and len(target.shape) == 2 else 1
    most = max(1, _PIECE_ELEMENTS // max(1, tensor.shape[0] * together)) * together
    with open(tensor.file, "rb") as stream:
        for first in range(0, count, most):
            size = min(most, count - first)
            stream.seek(tensor.begin + (target.first_row + first) * tensor.row_bytes)
            content = stream.read(size * tensor.row_bytes)
            if len(content) < size * tensor.row_bytes:
                raise ValueError("it became shorter while it was read")
            rows = np.frombuffer(content, np.uint8).reshape(size, tensor.row_bytes)
            yield rows if together == 1 else np.ascontiguousarray(rows[_order(size, size // together)])


def _order(count: int, heads: int) -> npt.NDArray[np.intp]:
    """The GGUF row of each checkpoint row. Rotary pairs are neighbours in GGUF, half a head apart in checkpoints."""
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _dequantized(rows: npt.NDArray[np.uint8], type_name: str) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(rows, GGMLQuantizationType[type_name])
    except NotImplementedError as error:
        raise ValueError(f"it has weights of the type {type_name}, which cannot be dequantised") from error
    return np.asarray(values, np.float32)


def _values(tensor: GgufTensor) -> Floats:
    """Values of a small tensor in float32."""
    (rows,) = _rows(Target((1, *tensor.shape), None), tensor)
    return _dequantized(rows, tensor.type_name).reshape(-1)


def _write_pooling(keys: GgufKeys, folder: Path) -> None:
    """Write the file's pooling type, if any, in the format of sentence-transformers."""
    if not (kind := keys.own("pooling_type", WHOLE)):
        return
    if kind not in _POOLINGS:
        raise ValueError(f"its pooling_type is {kind}; supported are 0 (none) and {', '.join(map(str, _POOLINGS))}")
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (folder / "1_Pooling").mkdir()
    _write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": _POOLINGS[kind]})
    types = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in modules]
    _write_json(folder / "modules.json", types)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    end_with_the_parent()
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
