"""Encoders of random weights, with a byte tokenizer that puts [CLS] and [SEP] around texts and pairs."""

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]

SIZES: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "modernbert": {"global_attn_every_n_layers": 3, "local_attention": 8},
}


def write_encoder(directory: Path, family: str = "bert", num_labels: int = 0, seed: int = 0, **config: Any) -> Path:
    """A checkpoint; with `num_labels`, of a classifier."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    sizes = SIZES | FAMILIES[family] | config | ({"num_labels": num_labels} if num_labels else {})
    torch.manual_seed(seed)
    kind = AutoModelForSequenceClassification if num_labels else AutoModel
    network = kind.from_config(AutoConfig.for_model(family, **sizes))
    # Fresh biases and norms are constant, and fresh weights small, which would hide errors.
    for name, parameter in network.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.2)
    network.save_pretrained(directory)
    write_pair_tokenizer(directory, has_types=sizes.get("type_vocab_size", 1) > 1)
    return directory


def write_pair_tokenizer(directory: Path, *, has_types: bool = True) -> None:
    """`has_types`: whether it marks the second text of a pair."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    second = 1 if has_types else 0
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )
    fast.save_pretrained(directory)


def write_modules(directory: Path, mode: str, *names: str, max_length: int | None = None) -> Path:
    """The files of sentence-transformers around a checkpoint: a pooling, and further modules by name."""
    kinds = ["Transformer", "Pooling", *names]
    modules = [
        {"idx": number, "path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    every = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(every | {f"pooling_mode_{mode}": True}))
    if max_length is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    return directory
