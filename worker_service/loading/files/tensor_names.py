"""Lists the names that a tensor may have in a checkpoint, the same as in transformers."""

from collections.abc import Iterator

ZERO_IF_MISSING = frozenset({"final_logits_bias"})
"""Tensors that are zero if missing: BART's first checkpoints have no final_logits_bias."""
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Ends of names in BERT's first checkpoints, converted from TensorFlow."""


def spellings(name: str) -> Iterator[str]:
    """Yield the given name first. Names lack their first part ("bert.") if a network was saved without its head. Text
    networks that were saved with a network for images are a part of a whole. `model` may be `backbone` (Nemotron-H).
    Published towers of CLIP and SigLIP have one more part in their names."""
    first, _, rest = name.partition(".")
    in_whole = [f"language_model.{name}"]
    if first == "model":
        in_whole += [f"model.language_model.{rest}", f"model.text_model.{rest}", f"backbone.{rest}"]
    towers = [rest.replace("vision_tower.", "vision_tower.vision_model.", 1)] if "vision_tower." in rest else []
    for one in (name, rest, *towers, *in_whole):
        if one:
            yield one
            for new, old in _OLD.items():
                if one.endswith(new):
                    yield one.removesuffix(new) + old
