"""Pixtral and Mistral 3: rows of image tokens, with a token after each row, of an image of nearly its own size."""

import math

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same


def pixtral_layouts(model: ModelImages, *, image_token_id: int) -> ImageLayouts:
    """`image_token_id`: the default of the family's config.json."""
    model.image_processor("PixtralImageProcessor")
    pixels, vision, processor = model.pixels, model.vision, model.processor
    processor.require("processor_class", "PixtralProcessor")
    patch, merge = processor.side("patch_size", 16), processor.integer("spatial_merge_size", 1)
    same("patch_size", {"processor_config.json": patch, "vision_config": vision.side("patch_size", 16)})
    merged = model.config.integer("spatial_merge_size", 2) if model.family == "mistral3" else 1
    same("spatial_merge_size", {"processor_config.json": merge, "config.json": merged})
    pixels.ignore("patch_size", "do_pad", "pad_size", "crop_size")  # replaced, for several images at once, or unused
    pixels.require("do_resize", True)
    pixels.require("do_center_crop", False)
    size = pixels.size("size", {"longest_edge": 1024})
    if size.keys() not in ({"longest_edge"}, {"height", "width"}):
        raise pixels.refused("size", "an object of longest_edge, or of height and width")
    highest, widest = size.get("height", size.get("longest_edge", 0)), size.get("width", size.get("longest_edge", 0))
    side = patch * merge
    token = model.image_token_id(processor.text("image_token", "[IMG]"), image_token_id)
    row_end = model.token_id(processor.text("image_break_token", "[IMG_BREAK]"))
    end = model.token_id(processor.text("image_end_token", "[IMG_END]"))

    def layout(width: int, height: int) -> ImageLayout:
        ratio = max(height / highest, width / widest)
        new_width, new_height = width, height
        if ratio > 1:
            new_width, new_height = math.floor(width / ratio), math.floor(height / ratio)
        if not new_width or not new_height:
            raise ValueError(
                f"has {width} x {height} pixels; scaled to at most {widest} x {highest}, it has less than one row or "
                "column of pixels"
            )
        rows, columns = (new_height - 1) // side + 1, (new_width - 1) // side + 1
        token_ids = ((token,) * columns + (row_end,)) * rows
        return ImageLayout((*token_ids[:-1], end), (ImagePart(0, len(token_ids) - 1),))

    return ImageLayouts(model.family, token, token, layout)
