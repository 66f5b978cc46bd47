"""Tiny random models on disk, each made once, their thread count, and GPU kernels without a GPU."""

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_networks import auto_class_of

from kernels import backends

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory of Hugging Face directories with random weights, by default of a Llama.

    Keyword arguments override TINY.
    """

    def make(model_type: str = "llama", **config: Any) -> Path:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import AutoConfig

        path = tmp_path_factory.mktemp(f"tiny-{model_type}")
        torch.manual_seed(0)
        network = AutoConfig.for_model(model_type, **TINY | config)
        model = auto_class_of(network).from_config(network)
        # Fresh biases and norms are constant, and fresh weights small, which would hide errors.
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                torch.nn.init.normal_(buffer, mean=float(name.endswith("layer_scalar")), std=0.2)
        model.save_pretrained(path)
        _drop_unknown(path / "config.json", model)
        Tokenizer(WordLevel({f"t{number}": number for number in range(131)}, "t0")).save(str(path / "tokenizer.json"))
        return path

    return make


def _drop_unknown(file: Path, model: Any) -> None:
    """Remove TINY's keys that this family does not know, because transformers keeps any key."""
    plain, code = type(model.config)(), inspect.getsource(sys.modules[type(model).__module__])
    json_, known = json.loads(file.read_text()), {*vars(plain), *plain.attribute_map}
    kept = {name: value for name, value in json_.items()
            if name not in TINY or name in known or hasattr(type(plain), name) or f'"{name}"' in code}  # fmt: skip
    file.write_text(json.dumps(kept))


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPU kernels compute for the CPU in Triton's interpreter, or on a GPU if there is one."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        import_module("triton_interpreter")
        monkeypatch.setitem(backends._BACKENDS, "cpu", "kernels.triton")
        monkeypatch.setitem(backends._INVARIANT, "cpu", "kernels.triton.invariant")
    backends.ops_for.cache_clear()
    yield
    backends.ops_for.cache_clear()
