"""Qwen2-VL to Qwen3.5: one image token for each square of merged patches, of an image of nearly its own size."""

import math

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same

MAX_RATIO = 200
"""Largest ratio of an image's sides, as in transformers."""


def qwen_layouts(model: ModelImages, *, patch_size: int, image_token_id: int) -> ImageLayouts:
    """`patch_size`, `image_token_id`: defaults of the family's config.json."""
    model.image_processor("Qwen2VLImageProcessor")
    model.processor.require("processor_class", *(f"{name}Processor" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")))
    pixels, vision = model.pixels, model.vision
    patch, merge = pixels.side("patch_size", 14), pixels.side("merge_size", 2)
    same("patch_size", {"the image processor": patch, "vision_config": vision.side("patch_size", patch_size)})
    same("merge_size", {"the image processor": merge, "vision_config": vision.side("spatial_merge_size", 2)})
    for settings, name in ((pixels, "temporal_patch_size"), (vision, "temporal_patch_size")):
        settings.require(name, 2)
    pixels.require("do_resize", True)
    pixels.ignore("do_center_crop", "crop_size", "do_pad", "pad_size")  # never read by this image processor
    size = dict(pixels.size("size", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}))
    least = pixels.integer("min_pixels", size.pop("shortest_edge", 0), least=0)
    most = pixels.integer("max_pixels", size.pop("longest_edge", 0), least=0)
    if not least or not most or size.keys() - {"min_pixels", "max_pixels"}:
        raise pixels.refused("size", "an object of shortest_edge and longest_edge")
    factor = patch * merge
    token = model.image_token_id(model.token("image_token", "<|image_pad|>"), image_token_id)

    def layout(width: int, height: int) -> ImageLayout:
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(
                f"has {width} x {height} pixels; the longer side may be at most {MAX_RATIO} times the shorter"
            )
        rows, columns = grid_of(width, height, factor, least, most)
        number = rows * columns
        return ImageLayout((token,) * number, (ImagePart(0, number),), (rows, columns))

    return ImageLayouts(model.family, token, token, layout)


def grid_of(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of squares of `factor` pixels, after the image is scaled to `least` to `most` pixels."""
    rows, columns = round(height / factor), round(width / factor)
    area = rows * columns * factor * factor
    if area > most:
        scale = math.sqrt(height * width / most)
        return max(1, math.floor(height / scale / factor)), max(1, math.floor(width / scale / factor))
    if area < least:
        scale = math.sqrt(least / (height * width))
        return math.ceil(height * scale / factor), math.ceil(width * scale / factor)
    return rows, columns
