"""The names under which a checkpoint may have a network's tensor. They are those that transformers finds it by.

transformers also prepends the first part to a name that lacks it; a network that may be stored so asks for the longer
name (`EncoderConfig.prefix`).
"""

from collections.abc import Iterator

ZERO_IF_MISSING = frozenset({"final_logits_bias"})
"""Tensors that are zeros where a checkpoint has none: BART's was added after its first checkpoints."""
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names of BERT's first checkpoints, which were TensorFlow's."""


def spellings(name: str) -> Iterator[str]:
    """The name itself first. A network that was saved without its head, as GPT-2, lacks the first part of each name."""
    for one in (name, name.partition(".")[2]):
        if one:
            yield one
            for new, old in _OLD.items():
                if one.endswith(new):
                    yield one.removesuffix(new) + old
