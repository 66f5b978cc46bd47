"""Finds out whether a model's images can be encoded, and loads the network that encodes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from pagewire_common.images.families import read_image_layouts
from pagewire_common.images.layout import ImageLayouts
from pagewire_common.start_error import StartError
from worker_service.execution.images.image_encoder import ImageEncoder
from worker_service.execution.images.processing import ImageProcessing
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.config.text_part import has_images

if TYPE_CHECKING:
    # These imports load transformers, which takes two seconds.
    from worker_service.models.images.config import ImageConfig
    from worker_service.models.images.tower import ImageTower

log = structlog.get_logger()


@dataclass(frozen=True)
class ImageNetwork:
    """The files and properties of an opened model's part for images."""

    checkpoint: Checkpoint
    layouts: ImageLayouts
    config: "ImageConfig"
    dtype: torch.dtype

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, files: list[Path], dtype: torch.dtype, device: torch.device
    ) -> "ImageNetwork | None":
        """None if prompts cannot contain images; the log says why if the model has a part for images. files: the
        tokenizer's, with the image processor's."""
        if not has_images(checkpoint.config):
            return None
        try:
            if device.type != "cpu":
                raise ValueError("images are read on CPUs only: set --device cpu")
            layouts = read_image_layouts({file.name: file for file in files})
            if layouts is None:
                return None
            from worker_service.models.images.config import ImageConfig

            return cls(checkpoint, layouts, ImageConfig.from_json(checkpoint.config), dtype)
        except ValueError as error:
            log.warning("prompts cannot contain images", reason=str(error))
            return None

    def build(self, device: torch.device) -> "ImageTower":
        """Allocate the weights unfilled. Raises StartError."""
        from worker_service.models.images.tower import ImageTower

        try:
            return ImageTower(self.config, self.dtype, device)
        # For impossible values in config.json, transformers may raise errors of any type.
        except (ValueError, TypeError, RuntimeError, ArithmeticError, AttributeError, KeyError, IndexError) as error:
            file = self.checkpoint.path / "config.json"
            raise StartError(f"{file} describes no network for images: {type(error).__name__}: {error}") from error

    def load(self, device: torch.device) -> ImageEncoder:
        """Load the weights. Raises StartError, and torch's errors if memory runs out."""
        from worker_service.models.images.pixels import PixelReader

        tower, reader = self.build(device), PixelReader(self.checkpoint.path, self.config)
        self.checkpoint.load_into(tower.checkpoint_tensors())
        tower.pack()
        return ImageEncoder(tower, ImageProcessing(reader.read), self.layouts.image_token_id)

    def cache_bytes(self, num_tokens: int, hidden_size: int) -> int:
        """Bytes of the embeddings of so many tokens."""
        return num_tokens * hidden_size * self.dtype.itemsize * (1 + self.config.num_deep)
