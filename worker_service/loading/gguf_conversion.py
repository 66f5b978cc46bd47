"""Turns a GGUF file into a Hugging Face directory with bfloat16 safetensors, through transformers' own reader.

It runs as a process of its own, `python -m worker_service.loading.gguf_conversion FILE FOLDER`, because reading takes
twice the model's size in float32, ten seconds for the default model, and imports that the worker does not need. On
Linux it ends with the worker.
"""

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire_common.child_process import end_with_the_parent
from pagewire_common.start_error import StartError
from worker_service.loading.gguf_header import read_gguf_header
from worker_service.wording import reason

if TYPE_CHECKING:
    import torch

VERSION = 3
"""Increased when the result of a conversion changes, so that folders converted earlier are not used."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Fill an existing folder with config, tokenizer and weights; raises StartError for a file that cannot be read."""
    read_gguf_header(file)
    command = [sys.executable, "-m", __name__, str(file), str(folder)]
    quiet = dict(os.environ, TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    child = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"the conversion ended with status {child.returncode}"])[-1]
        raise StartError(f"{file} cannot be converted from GGUF: {last}")


def _main(file: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as alone:
        # In a folder of its own: the library would also read neighbouring files, and the result shall depend on the
        # file alone.
        link = Path(alone, "model.gguf")
        link.symlink_to(file.resolve())
        try:
            _convert(link, folder)
        except Exception as error:  # whatever the library may raise
            sys.exit(reason(error))


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # The library makes room for what the sizes ask for before it looks at the tensors.
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    with torch.device("meta"):
        needed = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    stored = sum(math.prod(tensor.shape) for tensor in read_gguf_header(file).values())
    if needed > 2 * stored:  # a head that is the embedding may count twice
        sys.exit(f"its sizes ask for {needed} weights, and it has {stored}")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False).save_pretrained(folder)
    # The reader dequantises to float32 whatever it is asked for.
    model, loading = AutoModelForCausalLM.from_pretrained(
        file.parent,
        config=config,  # which it would read again: 12 s with a vocabulary of 262,144
        gguf_file=file.name,
        dtype=torch.float32,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    # It fills missing or misshapen tensors with random values, and only warns.
    if missing := sorted(loading["missing_keys"]):
        sys.exit(f"it has no tensor for {missing[0]}")
    if misshapen := sorted(loading["mismatched_keys"]):
        name, stored, needed = misshapen[0]
        sys.exit(f"its tensor for {name} is {list(stored)} where its sizes ask for {list(needed)}")
    _keep_blocks(file, model.state_dict(), folder)
    model = model.to(torch.bfloat16)
    # The weights are no longer quantised, and must not be saved as if they were.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.config.dtype = None, False, "bfloat16"
    model.save_pretrained(folder)


def _keep_blocks(file: Path, weights: "dict[str, torch.Tensor]", folder: Path) -> None:
    """Leave the quantised weights as the file has them in the folder, under the names of `weights`, in float32.

    A weight is known by the values of its rows, whatever its name and the order of its rows are in the file. Of equal
    ones each has one of the file's.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    from worker_service.loading.gguf_blocks import FILE, TYPES

    alike: dict[tuple[int, ...], list[tuple[str, list[int]]]] = {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            of_rows = [hash(row.tobytes()) for row in weight.numpy()]
            alike.setdefault((*weight.shape, sum(of_rows)), []).append((name, of_rows))
    blocks, types = {}, {}
    for tensor in GGUFReader(file).tensors:
        if (kind := tensor.tensor_type.name) not in TYPES or tensor.data.ndim != 2:
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        of_rows = [hash(row.tobytes()) for row in values]
        weights_left = alike.get((*values.shape, sum(of_rows)), [])
        found = next((one for one in weights_left if sorted(one[1]) == sorted(of_rows)), None)
        if found is not None:
            weights_left.remove(found)
            name, wanted = found
            places: dict[int, list[int]] = {}
            for place, one in enumerate(of_rows):
                places.setdefault(one, []).append(place)
            order = [places[one].pop() for one in wanted]
            blocks[name], types[name] = torch.from_numpy(tensor.data[order]), kind
    if blocks:
        save_file(blocks, folder / FILE, types)


if __name__ == "__main__":
    end_with_the_parent()
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
