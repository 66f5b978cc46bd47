"""Lists the names that a tensor of a network may have in a checkpoint. transformers accepts the same names.

If the names in a checkpoint lack their first part, such as "bert.", transformers adds this part. A network whose
checkpoints may lack this part requests the longer name (`EncoderConfig.prefix`), and the shorter name is also tried.
"""

from collections.abc import Iterator

ZERO_IF_MISSING = frozenset({"final_logits_bias"})
"""Names of tensors that are filled with zeros if a checkpoint lacks them. BART's first checkpoints have no
final_logits_bias."""
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Ends of tensor names, each with the end that BERT's first checkpoints use, which were converted from TensorFlow."""


def spellings(name: str) -> Iterator[str]:
    """Yield the names to look for in a checkpoint, beginning with the given name. The names in a checkpoint lack their
    first part if the network was saved without its head, as GPT-2 was."""
    for one in (name, name.partition(".")[2]):
        if one:
            yield one
            for new, old in _OLD.items():
                if one.endswith(new):
                    yield one.removesuffix(new) + old
