import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pagewire_client import LocalServer
from scheduler_service.model import ServedModel
from scheduler_service.tokenization import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('the user must speak last') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def byte_tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are single bytes, so that every character beyond ASCII spans several of them."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = CHAT_TEMPLATE
    directory = tmp_path_factory.mktemp("byte-tokenizer")
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer(byte_tokenizer_directory)


@pytest.fixture(scope="session")
def byte_model(byte_tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="bytes",
        fingerprint="f",
        dtype="float32",
        context_length=100,
        block_size=4,
        pool_tokens=400,
        vocabulary_size=259,
        max_num_seqs=8,
        has_priorities=False,
        eos_token_ids=(2,),
        tokenizer=byte_tokenizer,
    )


@pytest.fixture(scope="session")
def tiny_model_directory(byte_tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights that knows the byte tokenizer: a real model, and a fast one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    shutil.copytree(byte_tokenizer_directory, directory)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_server(tiny_model_directory: Path) -> Iterator[LocalServer]:
    """Both services with the tiny model and a pool of 64 blocks: 512 tokens."""
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=["--num-device-blocks", "64", "--block-size", "8", "--threads", "1", "--swap-space", "0"],
        scheduler_arguments=["--check-invariants"],
    ) as server:
        yield server
