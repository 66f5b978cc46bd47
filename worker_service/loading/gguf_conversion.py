"""Turns a GGUF file into a Hugging Face directory with bfloat16 safetensors, through transformers' own reader.

It runs as a process of its own, `python -m worker_service.loading.gguf_conversion FILE FOLDER`, because reading takes
twice the model's size in float32, ten seconds for the default model, and imports that the worker does not need.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pagewire_common.start_error import StartError
from worker_service.loading.gguf_header import read_gguf_header
from worker_service.wording import reason

VERSION = 1
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False).save_pretrained(folder)
    # The reader dequantises to float32 whatever it is asked for.
    model, loading = AutoModelForCausalLM.from_pretrained(
        file.parent,
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
    model = model.to(torch.bfloat16)
    # The weights are no longer quantised, and must not be saved as if they were.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.config.dtype = None, False, "bfloat16"
    model.save_pretrained(folder)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
