"""A fast Llama of random weights and a byte tokenizer."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('the user must speak last') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_byte_tokenizer(directory: Path) -> None:
    """Tokens are single bytes, so that every character beyond ASCII spans several."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def write_marked_tokenizer(
    directory: Path, byte_tokenizer_directory: Path, marks: list[str], template: str
) -> "PreTrainedTokenizerFast":
    """The byte tokenizer with further tokens, which are not special, and another chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(byte_tokenizer_directory)
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer


def write_tiny_llama(
    directory: Path, tokenizer_directory: Path, seed: int = 0, *, unlikely: Sequence[int] = (), **config: int
) -> None:
    """float32 weights for sequences of 512 tokens, and a copy of the tokenizer; `config` changes sizes.

    `unlikely`: token ids that are never the most probable.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(seed)
    shutil.copytree(tokenizer_directory, directory)
    model = LlamaForCausalLM(LlamaConfig(**sizes | config, bos_token_id=1, eos_token_id=2, initializer_range=0.2))
    if unlikely:
        _lower(model, unlikely)
    model.save_pretrained(directory)


def _lower(model: "LlamaForCausalLM", token_ids: Sequence[int]) -> None:
    """Make the logits of tokens negative: the first number of each hidden state is a constant, which they alone use."""
    model.model.embed_tokens.weight.data[:, 0] = 10.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[0] = layer.mlp.down_proj.weight.data[0] = 0.0
    model.lm_head.weight.data[:, 0] = 0.0
    model.lm_head.weight.data[list(token_ids)] = 0.0
    model.lm_head.weight.data[list(token_ids), 0] = -10.0
