"""Reads an image file, and prepares what the vision network reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pagewire_common.images.decoding import decode_image
from pagewire_common.images.head import read_head
from pagewire_common.start_error import StartError
from worker_service.models.images.config import TILED, ImageConfig
from worker_service.models.images.embeddings import Pixels


class PixelReader:
    """Runs transformers' image processor."""

    def __init__(self, folder: Path, config: ImageConfig) -> None:
        """folder: the model's. Raises StartError."""
        from transformers import AutoImageProcessor

        try:
            self._processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers may raise any error
            raise StartError(f"the image processor in {folder} cannot be read: {error}") from error
        self._tiles = TILED.get(config.network.model_type)
        self._options = _options(config.network)

    def read(self, data: bytes, width: int, height: int) -> Sequence[Pixels]:
        """The inputs of each part of an image that is encoded on its own. Raises ValueError for a file that is no image
        of this size, and the errors of transformers."""
        pixels = self._tensors([_decode(data, width, height)])
        if self._tiles is None:
            return [pixels]
        # The network reads one tile of these, with its mask.
        tiles = {name: torch.split(pixels[name], 1, self._tiles) for name in pixels if name.startswith("pixel_")}
        return [dict(zip(tiles, each, strict=True)) for each in zip(*tiles.values(), strict=True)]

    def read_beside(self, data: bytes, width: int, height: int) -> Sequence[Pixels]:
        """Like `read`, for an image beside others in its prompt, see `ImageLayouts.beside`."""
        pixels = self._tensors([[_decode(data, width, height), Image.new("RGB", (1, 1))]])
        return [pixels | {name: pixels[name][:1] for name in ("pixel_values", "image_sizes")}]

    def _tensors(self, images: list[Any]) -> dict[str, Tensor]:
        found = self._processor(images=images, return_tensors="pt", **self._options)
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _decode(data: bytes, width: int, height: int) -> Image.Image:
    """Raises ValueError."""
    # Before memory is taken for pixels: rooms and limits were counted for the size that the request says.
    head = read_head(data)
    if (head.width, head.height) not in ((width, height), (height, width)):
        raise ValueError(f"the file has {head[1:]} pixels, and the request says {(width, height)}")
    image: Image.Image = decode_image(data)
    if image.size != (width, height):
        raise ValueError(f"the image has {image.size} pixels, and the request says {(width, height)}")
    return image


def _options(network: Any) -> dict[str, Any]:
    """Options that a family's processor always passes to its image processor."""
    if network.model_type == "internvl":
        return {"crop_to_patches": True}
    if network.vision_config.model_type == "pixtral":
        side = network.vision_config.patch_size * getattr(network, "spatial_merge_size", 1)
        return {"patch_size": {"height": side, "width": side}}
    return {}
