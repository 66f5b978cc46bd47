"""Gemma 3: a square of pixels for every image, whose tokens attend to each other in both directions."""

import math
from itertools import takewhile

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same

_MAX_NEWLINES = 64
"""Gemma's tokenizer has tokens of up to 31."""
_TOKENS = {"boi": "<start_of_image>", "image": "<image_soft_token>", "eoi": "<end_of_image>"}
_OF_PAN_AND_SCAN = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")


def gemma3_layouts(model: ModelImages) -> ImageLayouts:
    model.vision.require("model_type", "siglip_vision_model")
    model.processor.require("processor_class", "Gemma3Processor")
    pixels = model.pixels
    model.image_processor("Gemma3ImageProcessor")
    pixels.require("do_resize", True)
    for key in ("do_pan_and_scan", "do_center_crop", "do_pad"):
        pixels.require(key, False)
    pixels.ignore("crop_size", "pad_size", *(f"pan_and_scan_{key}" for key in _OF_PAN_AND_SCAN))
    size = pixels.size("size", {"height": 224, "width": 224})
    side = model.vision.side("image_size", 224)
    if size != {"height": side, "width": side}:
        raise pixels.refused("size", f"the height and width of {side} pixels that vision_config states")
    number = model.processor.integer("image_seq_length", 256)
    stated, patches = model.config.integer("mm_tokens_per_image", 256), side // model.vision.side("patch_size", 16)
    pooled = patches // max(1, patches // math.isqrt(stated))
    found = {"processor_config.json": number, "config.json": stated, "the network": pooled**2}
    same("the number of an image's tokens", found)
    begin, image, end = (model.token(f"{name}_token", default) for name, default in _TOKENS.items())
    token = model.image_token_id(image, 262144)
    token_ids = tuple(model.encode(f"\n\n{begin}{image * number}{end}\n\n"))
    first = token_ids.index(token)
    if token_ids[first : first + number] != (token,) * number or token_ids.count(token) != number:
        raise ValueError(f"the tokenizer does not write {number} tokens {image!r} in a row")
    layout = ImageLayout(token_ids, (ImagePart(first, first + number),))
    runs = [model.encode("\n" * number) for number in range(_MAX_NEWLINES + 1)]
    newlines = [*takewhile(lambda run: runs.count(run) == 1, runs)]  # up to a run that is an unknown token
    return ImageLayouts(model.family, token, model.token_id(begin), lambda *_: layout, True, newlines)
