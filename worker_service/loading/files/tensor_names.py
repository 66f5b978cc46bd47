"""Lists the names that a tensor may have in a checkpoint, the same as in transformers."""

from collections.abc import Iterator

ZERO_IF_MISSING = frozenset({"final_logits_bias"})
"""Tensors that are zero if missing: BART's first checkpoints have no final_logits_bias."""
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Ends of names in BERT's first checkpoints, converted from TensorFlow."""


def spellings(name: str) -> Iterator[str]:
    """Yield the given name first. Names lack their first part ("bert.") if a network was saved without its head."""
    for one in (name, name.partition(".")[2]):
        if one:
            yield one
            for new, old in _OLD.items():
                if one.endswith(new):
                    yield one.removesuffix(new) + old
