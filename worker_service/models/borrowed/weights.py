"""Gives views of a network's weights the names and shapes of checkpoint tensors. Some parameters are renamed, or
contain several checkpoint tensors, such as those of all experts. transformers splits and reshapes them when it saves a
model; the same operations run here on views. Tensors are thus read without a copy."""

from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion


class _View(Tensor):
    """A tensor whose `contiguous` never copies."""

    def contiguous(self, *_: Any, **__: Any) -> "_View":
        return self


def tied_tensors(network: Any) -> dict[str, tuple[str, str]]:
    """Names of tied tensors in a checkpoint, each with its name in the network and the checkpoint name it is tied
    to."""
    return {
        _name_in_checkpoint(network, name): (name, _name_in_checkpoint(network, other))
        for name, other in network.all_tied_weights_keys.items()
    }


def _name_in_checkpoint(network: Any, name: str) -> str:
    stored: str
    (stored,) = revert_weight_conversion(network, {name: network.get_parameter(name).detach().as_subclass(_View)})
    return stored


def checkpoint_places(network: Any) -> dict[str, Tensor]:
    """Places for checkpoint tensors, by name. Raises ValueError if a tensor is no view of a parameter."""
    # A tied weight has several names in the network; checkpoints use the one that the others are tied to.
    weights: dict[int, tuple[str, Tensor]] = {}
    is_tied = network.all_tied_weights_keys.__contains__
    for name, tensor in sorted(network.state_dict(keep_vars=True).items(), key=lambda item: is_tied(item[0])):
        if tensor.is_floating_point():
            weights.setdefault(id(tensor), (name, tensor))
    views = {name: tensor.detach().as_subclass(_View) for name, tensor in weights.values()}
    memory = {view.untyped_storage()._cdata for view in views.values()}
    places = {name: place.as_subclass(Tensor) for name, place in revert_weight_conversion(network, views).items()}
    for name, place in places.items():
        if place.untyped_storage()._cdata not in memory:
            raise ValueError(f"its tensor {name} is stored in another order than it is used in")
    return places
