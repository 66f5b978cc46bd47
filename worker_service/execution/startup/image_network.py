"""Finds out whether a model's images can be encoded, and loads the network that encodes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from pagewire_common.images.families import read_image_layouts
from pagewire_common.images.layout import ImageLayouts
from pagewire_common.sounds.families import has_sounds, read_sound_layouts
from pagewire_common.start_error import StartError
from worker_service.execution.images.image_encoder import ImageEncoder
from worker_service.execution.images.processing import ImageProcessing
from worker_service.execution.images.reader_process import reader_process
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.config.text_part import has_images

if TYPE_CHECKING:
    # These imports load transformers, which takes two seconds.
    from worker_service.models.images.config import ImageConfig
    from worker_service.models.images.tower import ImageTower
    from worker_service.models.sounds.network import SoundConfig, SoundTower

log = structlog.get_logger()


@dataclass(frozen=True)
class ImageNetwork:
    """The files and properties of an opened model's part for images."""

    checkpoint: Checkpoint
    layouts: ImageLayouts
    config: "ImageConfig | SoundConfig"
    dtype: torch.dtype

    @classmethod
    def open(cls, checkpoint: Checkpoint, files: list[Path], dtype: torch.dtype) -> "ImageNetwork | None":
        """None if prompts cannot contain images; the log says why if the model has a part for images. files: the
        tokenizer's, with the image processor's."""
        if not has_images(checkpoint.config):
            return None
        try:
            by_name = {file.name: file for file in files}
            layouts = read_sound_layouts(by_name) if has_sounds(checkpoint.config) else read_image_layouts(by_name)
            if layouts is None:
                return None
            if has_sounds(checkpoint.config):
                from worker_service.models.sounds.network import SoundConfig

                return cls(checkpoint, layouts, SoundConfig.from_json(checkpoint.config), dtype)
            from worker_service.models.images.config import ImageConfig

            return cls(checkpoint, layouts, ImageConfig.from_json(checkpoint.config), dtype)
        except ValueError as error:
            log.warning("prompts cannot contain images or sounds", reason=str(error))
            return None

    def build(self, device: torch.device) -> "ImageTower | SoundTower":
        """Allocate the weights unfilled. Raises StartError."""
        from worker_service.models.images.config import ImageConfig
        from worker_service.models.images.tower import ImageTower
        from worker_service.models.sounds.network import SoundTower

        try:
            if isinstance(self.config, ImageConfig):
                return ImageTower(self.config, self.dtype, device)
            return SoundTower(self.config, self.dtype, device)
        # For impossible values in config.json, transformers may raise errors of any type.
        except (ValueError, TypeError, RuntimeError, ArithmeticError, AttributeError, KeyError, IndexError) as error:
            file = self.checkpoint.path / "config.json"
            raise StartError(
                f"{file} describes no network for images or sounds: {type(error).__name__}: {error}"
            ) from error

    def load(self, device: torch.device) -> ImageEncoder:
        """Load the weights. Raises StartError, and torch's errors if memory runs out."""
        from worker_service.models.images.config import ImageConfig
        from worker_service.models.images.pixels import PixelReader
        from worker_service.models.sounds.network import SoundReader

        tower, folder = self.build(device), self.checkpoint.path
        config = self.config
        reader = PixelReader(folder, config) if isinstance(config, ImageConfig) else SoundReader(folder, config)
        self.checkpoint.load_into(tower.checkpoint_tensors())
        tower.pack()
        layouts, begin = self.layouts, reader_process().begin
        beside = begin(reader.read_beside) if isinstance(reader, PixelReader) and layouts.beside is not None else None
        processing = ImageProcessing(begin(reader.read), beside)
        return ImageEncoder(tower, processing, layouts.image_token_id, attends_both_ways=layouts.attends_both_ways)

    def cache_bytes(self, num_tokens: int, hidden_size: int) -> int:
        """Bytes of the embeddings of so many tokens."""
        return num_tokens * hidden_size * self.dtype.itemsize * (1 + self.config.num_deep)
