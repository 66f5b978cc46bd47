"""Idefics 3 and SmolVLM: the image in tiles of one size, row by row, and then as a whole in one tile."""

import math
from functools import lru_cache

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same

_MAX_SIDE = 4096
"""Largest side after the image is resized, as in transformers."""
_FAKE, _IMAGE, _GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"


def idefics_layouts(model: ModelImages) -> ImageLayouts:
    model.image_processor("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    model.processor.require(
        "processor_class", {"idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor"}[model.family]
    )
    pixels = model.pixels
    pixels.require("do_resize", True)
    pixels.ignore(
        "do_pad", "pad_size", "do_center_crop", "crop_size", "video_sampling"
    )  # for batches and videos, or unused
    size, tile = pixels.size("size", {"longest_edge": 4 * 364}), pixels.size("max_image_size", {"longest_edge": 364})
    if size.keys() != {"longest_edge"}:
        raise pixels.refused("size", "an object of longest_edge")
    if tile.keys() != {"longest_edge"}:
        raise pixels.refused("max_image_size", "an object of longest_edge")
    splits, longest, side = pixels.flag("do_image_splitting", True), size["longest_edge"], tile["longest_edge"]
    number = _embeddings_of_tile(model, side)
    image, fake, whole = _IMAGE, _FAKE, _GLOBAL
    if model.family == "smolvlm":
        image, fake = model.token("image_token", _IMAGE), model.token("fake_image_token", _FAKE)
        whole = model.token("global_image_token", _GLOBAL)
    token = model.image_token_id(image, 128257)

    @lru_cache(maxsize=256)
    def tiled(rows: int, columns: int) -> ImageLayout:
        texts = [
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        text = "".join(texts) + ("\n" if rows else "") + f"{fake}{whole}{image}{fake}"
        token_ids: list[int] = []
        parts: list[ImagePart] = []
        for token_id in model.encode(text):  # each tile has one image token
            if token_id == token:
                parts.append(ImagePart(len(token_ids), len(token_ids) + number))
                token_ids += [token] * number
            else:
                token_ids.append(token_id)
        return ImageLayout(tuple(token_ids), tuple(parts))

    def layout(width: int, height: int) -> ImageLayout:
        rows, columns = tiles_of(width, height, longest, side) if splits else (0, 0)
        return tiled(rows, columns)

    return ImageLayouts(model.family, token, token, layout)


def tiles_of(width: int, height: int, longest: int, side: int) -> tuple[int, int]:
    """Rows and columns of tiles, (0, 0) if the image is a single tile. The steps round as in transformers."""
    width, height = _resize(width, height, longest)
    ratio = width / height
    if max(width, height) > _MAX_SIDE:
        if width >= height:
            width, height = _MAX_SIDE, max(int(_MAX_SIDE / ratio), 1)
        else:
            width, height = max(int(_MAX_SIDE * ratio), 1), _MAX_SIDE
        ratio = width / height
    if width >= height:
        columns = math.ceil(width / side)
        rows = math.ceil(int(columns * side / ratio) / side)
    else:
        rows = math.ceil(height / side)
        columns = math.ceil(int(rows * side * ratio) / side)
    return (0, 0) if rows == columns == 1 else (rows, columns)


def _resize(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size after the longer side became `longest`. The shorter side is made even."""
    ratio = width / height
    if width >= height:
        shorter = int(longest / ratio)
        return longest, max(shorter + shorter % 2, 1)
    shorter = int(longest * ratio)
    return max(shorter + shorter % 2, 1), longest


def _embeddings_of_tile(model: ModelImages, side: int) -> int:
    patch, scale = model.vision.side("patch_size", 32), model.config.integer("scale_factor", 2)
    patches = side // patch
    if patches % scale:
        raise ValueError(f"a tile has {patches} patches in a row, which scale_factor {scale} does not divide")
    number = (patches // scale) ** 2
    stated = model.processor.integer("image_seq_len", 169)
    same("the number of image tokens of a tile", {"processor_config.json": stated, "config.json": number})
    return number
