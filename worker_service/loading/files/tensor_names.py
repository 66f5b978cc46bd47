"""Lists the names that a tensor may have in a checkpoint, the same as in transformers."""

from collections.abc import Iterator

ZERO_IF_MISSING = frozenset({"final_logits_bias"})
"""Tensors that are zero if missing: BART's first checkpoints have no final_logits_bias."""
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Ends of names in BERT's first checkpoints, converted from TensorFlow."""


def spellings(name: str) -> Iterator[str]:
    """Yield the given name first. Names lack their first part ("bert.") if a network was saved without its head. Text
    networks that were saved with an encoder of pictures are a part of `model`."""
    first, _, rest = name.partition(".")
    for one in (name, rest, f"model.language_model.{rest}" if first == "model" else ""):
        if one:
            yield one
            for new, old in _OLD.items():
                if one.endswith(new):
                    yield one.removesuffix(new) + old
