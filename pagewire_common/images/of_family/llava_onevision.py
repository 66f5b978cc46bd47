"""LLaVA-OneVision: like LLaVA-NeXT, but a canvas of too many embeddings is scaled down. Beside other images in its
prompt, an image gets a border that makes it a square, and is a single tile with one embedding at its end."""

import math
import re

from pagewire_common.images.layout import BESIDE, ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same
from pagewire_common.images.of_family.llava import SquareSizes
from pagewire_common.images.of_family.llava_next import grid_of, read_canvases

_CANVASES = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
"""transformers' default: heights and widths in pixels."""
_ASPECT_RATIO = "anyres_max_9"
_LARGEST_RATIO = 1.1
"""Ratio of the sides of a canvas and of the allowed number of embeddings, above which the canvas is scaled."""


def llava_onevision_layouts(model: ModelImages) -> ImageLayouts:
    model.image_processor("LlavaOnevisionImageProcessor")
    model.processor.require("processor_class", "LlavaOnevisionProcessor")
    model.processor.ignore("video_token")
    model.vision.require("model_type", "siglip_vision_model")
    for settings in (model.config, model.processor):
        settings.require("vision_feature_select_strategy", "full")
    pixels = model.pixels
    for key, value in {"do_resize": True, "do_pad": True, "do_center_crop": False}.items():
        pixels.require(key, value)
    pixels.ignore("pad_size")  # never read by this image processor
    side = pixels.side("size", 384)
    cropped, of_tower = pixels.side("crop_size", side), model.vision.side("image_size", 224)
    same("the size of tiles", {"size": side, "crop_size": cropped, "vision_config": of_tower})
    patches = side // model.vision.side("patch_size", 16)
    number = patches**2
    stated = model.processor.integer("num_image_tokens", number)
    same("the number of a tile's embeddings", {"processor_config.json": stated, "the tower": number})
    most = _most_tiles(model) * number
    canvases = read_canvases(model, side, _CANVASES)
    token = model.image_token_id(model.token("image_token", model.processor.text("image_token", "<image>")), 151646)

    def layout(width: int, height: int) -> ImageLayout:
        rows, columns = grid_of(width, height, canvases, side, patches)
        if (ratio := math.sqrt(rows * columns / most)) > _LARGEST_RATIO:
            rows, columns = int(rows // ratio), int(columns // ratio)
            if not rows or not columns:
                raise ValueError(
                    f"has {width} x {height} pixels; scaled, it has less than one row or column of embeddings"
                )
        total = number + rows * (columns + 1)
        return ImageLayout((token,) * total, (ImagePart(0, total),))

    def beside(width: int, height: int) -> ImageLayout:
        SquareSizes(side, pads=True).check(width, height)
        return ImageLayout((token,) * (number + 1), (ImagePart(0, number + 1),), first_part=BESIDE)

    return ImageLayouts(model.family, token, token, layout, beside=beside)


def _most_tiles(model: ModelImages) -> int:
    """Tiles whose number of embeddings a canvas may have."""
    said = model.config.text("vision_aspect_ratio", _ASPECT_RATIO)
    stated = model.processor.text("vision_aspect_ratio", _ASPECT_RATIO)
    same("vision_aspect_ratio", {"config.json": said, "processor_config.json": stated})
    if not (found := re.fullmatch(r"anyres_max_([1-9][0-9]{0,2})", said)):
        raise model.config.refused("vision_aspect_ratio", f"a text such as {_ASPECT_RATIO}")
    return int(found[1])
