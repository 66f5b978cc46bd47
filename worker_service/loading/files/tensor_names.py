"""Names that a network's tensor may have in a checkpoint: the same that transformers accepts.

transformers also prepends the first part to a name that lacks it. If a network's checkpoints may lack the first part,
the network asks for the longer name (`EncoderConfig.prefix`).
"""

from collections.abc import Iterator

ZERO_IF_MISSING = frozenset({"final_logits_bias"})
"""Tensors that are zeros if a checkpoint lacks them: BART's first checkpoints are older than this bias."""
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names in BERT's first checkpoints, which came from TensorFlow."""


def spellings(name: str) -> Iterator[str]:
    """Names to try, the name itself first. A network saved without its head, like GPT-2, lacks the first part of each
    name."""
    for one in (name, name.partition(".")[2]):
        if one:
            yield one
            for new, old in _OLD.items():
                if one.endswith(new):
                    yield one.removesuffix(new) + old
