"""The weights of a network of transformers under the names, and in the shapes, that checkpoints have for them.

Some families hold several tensors of a checkpoint, most often experts, as one parameter, or under another name. What
transformers does to parameters when it saves them is done here to views of them, without a copy, so that a
checkpoint's tensors are read straight into their places in the parameters.
"""

from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion


class _View(Tensor):
    """A tensor that stays a view of its memory when it is asked to be contiguous."""

    def contiguous(self, *_: Any, **__: Any) -> "_View":
        return self


def checkpoint_places(network: Any) -> dict[str, Tensor]:
    """Places by the checkpoint's names. Raises ValueError if a tensor has no place of its own in memory."""
    # Tied weights have several names, of which a checkpoint has the first.
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            weights.setdefault(id(tensor), (name, tensor))
    views = {name: tensor.detach().as_subclass(_View) for name, tensor in weights.values()}
    memory = {view.untyped_storage()._cdata for view in views.values()}
    places = {name: place.as_subclass(Tensor) for name, place in revert_weight_conversion(network, views).items()}
    for name, place in places.items():
        if place.untyped_storage()._cdata not in memory:
            raise ValueError(f"its tensor {name} is stored in another order than it is used in")
    return places
