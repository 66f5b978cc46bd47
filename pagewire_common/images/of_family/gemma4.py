"""Gemma 4: an image of nearly its own shape, scaled to at most a fixed number of tokens, one for each square of merged
patches. In larger models, these tokens attend to each other in both directions."""

import math

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same

_MAX_TOKENS = (280, 70, 140, 560, 1120)
"""The default, and the other numbers that transformers allows."""
_IGNORED = ("size", "do_center_crop", "crop_size", "do_pad", "pad_size")
_OF_SOUNDS = ("feature_extractor", "audio_seq_length", "audio_ms_per_token")


def gemma4_layouts(model: ModelImages) -> ImageLayouts:
    model.image_processor("Gemma4ImageProcessor")
    model.processor.require("processor_class", "Gemma4Processor")
    model.processor.ignore("image_seq_length", *_OF_SOUNDS)  # never read for images
    pixels, vision = model.pixels, model.vision
    vision.require("model_type", "gemma4_vision")
    pixels.require("do_resize", True)
    pixels.ignore(*_IGNORED)  # never read by this image processor
    patch = pixels.integer("patch_size", 16)
    merge = pixels.integer("pooling_kernel_size", 3, least=2)  # with 1, transformers' network leaves no padding out
    same("patch_size", {"the image processor": patch, "vision_config": vision.integer("patch_size", 16)})
    pooled = vision.integer("pooling_kernel_size", 3)
    same("pooling_kernel_size", {"the image processor": merge, "vision_config": pooled})
    pixels.require("max_soft_tokens", *_MAX_TOKENS)
    most = pixels.integer("max_soft_tokens", _MAX_TOKENS[0])
    if most * merge > (places := vision.integer("position_embedding_size", 10240)):
        raise pixels.refused("max_soft_tokens", f"at most {places // merge}, for {places} positions of patches")
    token = model.image_token_id(model.token("image_token", "<|image|>"), 258880)
    begin = model.token_id(model.token("boi_token", "<|image>"))
    end = model.token_id(model.token("eoi_token", "<image|>"))

    def layout(width: int, height: int) -> ImageLayout:
        rows, columns = grid_of(width, height, patch, merge, most)
        number = rows * columns
        return ImageLayout((begin, *((token,) * number), end), (ImagePart(1, 1 + number),))

    both_ways = model.config.group("text_config").text("use_bidirectional_attention", "") == "vision"
    return ImageLayouts(model.family, token, token, layout, both_ways)


def grid_of(width: int, height: int, patch: int, merge: int, most: int) -> tuple[int, int]:
    """Rows and columns of squares of merged patches, at most `most`. The steps round as in transformers."""
    side = merge * patch
    factor = math.sqrt(most * merge**2 * patch**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not rows:
        return 1, min(math.floor(width / height), most)
    if not columns:
        return min(math.floor(height / width), most), 1
    return rows, columns
