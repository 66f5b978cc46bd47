"""Provides views of the weights of a network in transformers' code. The views have the names and shapes of the tensors
in a checkpoint.

In some families, a parameter has another name than in the checkpoint, or contains several checkpoint tensors, such as
those of all experts. When transformers saves a model, it renames, splits and reshapes such parameters to checkpoint
tensors. This module applies the same operations of transformers to views of the parameters, without a copy. Checkpoint
tensors are thus read directly into their places in the parameters.
"""

from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion


class _View(Tensor):
    """A tensor whose method `contiguous` always returns the tensor itself, never a copy."""

    def contiguous(self, *_: Any, **__: Any) -> "_View":
        return self


def tied_tensors(network: Any) -> dict[str, tuple[str, str]]:
    """The tied tensors of a network, by the tensor's name in a checkpoint.

    Each value consists of the tied tensor's name in the network, and the checkpoint name of the tensor to which it is
    tied.
    """
    return {
        _name_in_checkpoint(network, name): (name, _name_in_checkpoint(network, other))
        for name, other in network.all_tied_weights_keys.items()
    }


def _name_in_checkpoint(network: Any, name: str) -> str:
    stored: str
    (stored,) = revert_weight_conversion(network, {name: network.get_parameter(name).detach().as_subclass(_View)})
    return stored


def checkpoint_places(network: Any) -> dict[str, Tensor]:
    """The places in the network's memory into which the tensors of a checkpoint are read, by name. Raises ValueError if
    a tensor has no such place, because it is not a view of a parameter."""
    # A tied weight has several names in the network. Checkpoints contain the weight under the first of these names.
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
