"""Converts a GGUF file to a Hugging Face directory with bfloat16 safetensors.

A GGUF file is refused if it has a key or a tensor that the conversion does not use. Weights are converted to bfloat16
in pieces of a few megabytes. Quantised weights are also copied unchanged to a second file in the directory.

The conversion runs in a separate process, `python -m worker_service.loading.gguf.conversion FILE FOLDER`, for two
reasons. First, a malformed file may crash the tokenizers library and its process. Second, the conversion of a
vocabulary of 262,144 tokens requires 300 MB of memory, which the process returns when it ends. On Linux, the process is
ended if the worker ends.
"""

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
"""Version of the conversion. The version must be increased whenever the results of the conversion change, so that
folders of an older version are not used."""
_REFUSED = 2
"""Exit status of a conversion process that refused the GGUF file and printed the reason."""
_PIECE_ELEMENTS = 1 << 21
_POSITIONS = {"llama": (FREQS, LONG, SHORT), "phi3": (LONG, SHORT)}
"""Names of the GGUF tensors with divisors of rotary angles, by architecture."""
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_MAX_SHOWN = 8

Floats = npt.NDArray[np.float32]


def convert_gguf(file: Path, folder: Path) -> None:
    """Convert a GGUF file, and fill an existing folder with config, tokenizer and weights. `file`: the model's GGUF
    file, or any part of a model that is split into several files.

    Raises StartError if the GGUF file cannot be read, or if any key or tensor cannot be converted.
    """
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
    except Exception as error:  # the packages gguf and tokenizers may raise any error
        refusal = f"{file} cannot be converted from GGUF: {reason(error)}"
    else:
        return
    sys.stderr.write(f"{refusal}\n")
    sys.exit(_REFUSED)


def _convert(file: GgufFile, folder: Path) -> None:
    # The import is inside this function, so that workers that import this module do not load the tokenizers library.
    from worker_service.loading.gguf.tokenizer import convert_tokenizer

    keys, tensors = GgufKeys(file.metadata), file.tensors
    if (kind := keys.get("general.type", TEXT)) not in (None, "model"):
        raise ValueError(f"it is no model but, by its general.type, {shown(kind)}")
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
        raise ValueError(f"no part of the architecture {keys.architecture} is made of its tensor {listed}{more}")
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
        if len(target.shape) == 1:  # a bias or a norm is stored as one row
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
    """Yield the bytes of a target's rows, in the order of rows in the Hugging Face checkpoint. Each yielded array
    contains several rows."""
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
    """For each row of the Hugging Face checkpoint, the number of the same row in the GGUF file. The two rows of a
    rotary pair are neighbours in the GGUF file, and half a head apart in the checkpoint."""
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _dequantized(rows: npt.NDArray[np.uint8], type_name: str) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(rows, GGMLQuantizationType[type_name])
    except NotImplementedError as error:
        raise ValueError(f"it has weights of the type {type_name}, which cannot be widened") from error
    return np.asarray(values, np.float32)


def _values(tensor: GgufTensor) -> Floats:
    """All values of a small tensor, converted to float32."""
    (rows,) = _rows(Target((1, *tensor.shape), None), tensor)
    return _dequantized(rows, tensor.type_name).reshape(-1)


def _write_pooling(keys: GgufKeys, folder: Path) -> None:
    """If the GGUF file states a pooling type, write it to modules.json and 1_Pooling, in the format of
    sentence-transformers."""
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
