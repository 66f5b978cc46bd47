"""Encodes images in transformers' code: the vision network, and the projection to the decoder's hidden size."""

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor, nn

from worker_service.models.borrowed.network import build_network, pack_linears
from worker_service.models.borrowed.weights import checkpoint_places
from worker_service.models.images.attention import NAME
from worker_service.models.images.config import ImageConfig
from worker_service.models.images.embeddings import ImageEmbeddings, Pixels

_TEXT = ("language_model", "text_model")
"""Names of the text network, which the native decoder replaces."""


class ImageTower:
    def __init__(self, config: ImageConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights unfilled."""
        self._dtype, self._device = dtype, device
        self._network = build_network(config, dtype, device, NAME)
        for name in _TEXT:
            if hasattr(self._network, name):
                delattr(self._network, name)
        if config.network.model_type == "mistral3":
            # transformers' code removes the first dimension, which is the embeddings' if an image has only one.
            self._network.multi_modal_projector.register_forward_hook(lambda *called: called[-1].unsqueeze(0))
        self._takes = signature(self._network.get_image_features).parameters

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See `Loadable.checkpoint_tensors`."""
        return {f"model.{name}": place for name, place in checkpoint_places(self._network).items()}

    def pack(self) -> None:
        """Called once, after all tensors have been filled."""
        pack_linears([module for module in self._network.modules() if type(module) is nn.Linear])

    def encode(self, pixels: Pixels) -> ImageEmbeddings:
        """Encode one image or one part of one. pixels: the image processor's result."""
        inputs = {name: value.to(self._device) for name, value in pixels.items() if name in self._takes}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        output = self._network.get_image_features(**inputs, return_dict=True)
        return ImageEmbeddings(
            _joined(output.pooler_output),
            [_joined(layer) for layer in getattr(output, "deepstack_features", None) or ()],
        )


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """The rows of one image, [image tokens, hidden_size]."""
    rows = features if isinstance(features, Tensor) else torch.cat([*features])
    return rows.flatten(0, -2)
