"""Inputs and results of vision networks. Imports no transformers, which takes two seconds."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

Pixels = Mapping[str, Tensor]
"""Inputs of the vision network for one image, or for one part of one, by name."""


class ImageEmbeddings(NamedTuple):
    """The embeddings of an image, which the decoder reads."""

    embeddings: Tensor
    """[image tokens, hidden_size]."""
    deep: Sequence[Tensor] = ()
    """Added to hidden states after each of the first layers, each [image tokens, hidden_size]."""
