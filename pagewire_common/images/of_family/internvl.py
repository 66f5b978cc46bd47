"""InternVL: the image in tiles of one size, as many as fit its shape best, and then as a whole in one tile."""

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same

MAX_TILES = 256


def internvl_layouts(model: ModelImages) -> ImageLayouts:
    model.image_processor("GotOcr2ImageProcessor")
    model.processor.require("processor_class", "InternVLProcessor")
    pixels = model.pixels
    pixels.ignore("crop_to_patches")  # the processor of this family always sets it
    pixels.require("do_resize", True)
    pixels.ignore("do_pad", "pad_size", "do_center_crop", "crop_size")  # never read by this image processor
    side = pixels.side("size", 384)
    least, most = pixels.integer("min_patches", 1), pixels.integer("max_patches", 12)
    if most > MAX_TILES or least > most:
        raise pixels.refused("max_patches", f"from min_patches to {MAX_TILES}")
    number = _embeddings_of_tile(model, side)
    token = model.image_token_id(model.token("context_image_token", "<IMG_CONTEXT>"), 151667)
    begin = model.token_id(model.token("start_image_token", "<img>"))
    end = model.token_id(model.token("end_image_token", "</img>"))
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if least <= columns * rows
    ]
    grids.sort(key=lambda grid: grid[0] * grid[1])

    def layout(width: int, height: int) -> ImageLayout:
        tiles = tiles_of(width, height, side, grids) if most > 1 else 1
        num_parts = tiles + 1 if tiles > 1 else 1
        parts = tuple(ImagePart(1 + part * number, 1 + (part + 1) * number) for part in range(num_parts))
        return ImageLayout((begin, *((token,) * (num_parts * number)), end), parts)

    return ImageLayouts(model.family, token, token, layout)


def tiles_of(width: int, height: int, side: int, grids: list[tuple[int, int]]) -> int:
    """The number of tiles of the grid whose shape is nearest; of equally near ones the largest with at most twice the
    image's pixels. `grids`: columns and rows, sorted by their number of tiles."""
    ratio, nearest, best = width / height, float("inf"), 1
    for columns, rows in grids:
        difference, tiles = abs(ratio - columns / rows), columns * rows
        if difference < nearest or (difference == nearest and width * height > 0.5 * side * side * tiles):
            nearest, best = difference, tiles
    return best


def _embeddings_of_tile(model: ModelImages, side: int) -> int:
    vision, config = model.vision, model.config
    same("the size of tiles", {"the image processor": side, "vision_config": vision.side("image_size", 448)})
    config.require("vision_feature_select_strategy", "default")
    config.require("downsample_ratio", 0.5)
    patches = side // vision.side("patch_size", 14)
    if patches % 2:
        raise ValueError(f"a tile has {patches} patches in a row, which downsample_ratio 0.5 does not divide")
    number = (patches // 2) ** 2
    stated = model.processor.integer("image_seq_length", 256)
    same("the number of image tokens of a tile", {"processor_config.json": stated, "config.json": number})
    return number
