"""Names that a network's tensor may have in a checkpoint, as in transformers.

transformers also adds a missing first part to a name. If a network's checkpoints may lack the first part of names, the
network requests the longer name (`EncoderConfig.prefix`).
"""

from collections.abc import Iterator

ZERO_IF_MISSING = frozenset({"final_logits_bias"})
"""Tensors that become zeros if they are missing in a checkpoint. BART's first checkpoints have no final_logits_bias."""
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Parts of names in BERT's first checkpoints, which came from TensorFlow."""


def spellings(name: str) -> Iterator[str]:
    """Names to try, the given name first. If a network was saved without its head, such as GPT-2, names lack their
    first part."""
    for one in (name, name.partition(".")[2]):
        if one:
            yield one
            for new, old in _OLD.items():
                if one.endswith(new):
                    yield one.removesuffix(new) + old
