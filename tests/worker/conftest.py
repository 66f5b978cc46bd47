"""A tiny random Llama on disk, made once, and the thread count that suits it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory of Hugging Face directories with random weights; keyword arguments override TINY."""

    def make(**config: Any) -> Path:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import LlamaConfig, LlamaForCausalLM

        path = tmp_path_factory.mktemp("tiny-llama")
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**TINY | config))
        # Fresh biases and norms are constant, which would hide a mistaken one.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        model.save_pretrained(path)
        Tokenizer(WordLevel({f"t{number}": number for number in range(131)}, "t0")).save(str(path / "tokenizer.json"))
        return path

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """The plain tiny model."""
    return make_checkpoint()
