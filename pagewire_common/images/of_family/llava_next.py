"""LLaVA-NeXT: an image as a whole in the size of a tile, and in tiles on a canvas of the size that fits best. The
canvas has an embedding of its own at the end of each row, and embeddings of its border alone are left out."""

from collections.abc import Sequence

from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same
from pagewire_common.images.of_family.llava import embeddings_of_square

MAX_TILES = 256
_CANVASES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""transformers' default: heights and widths in pixels."""


def llava_next_layouts(model: ModelImages) -> ImageLayouts:
    model.image_processor("LlavaNextImageProcessor")
    model.processor.require("processor_class", "LlavaNextProcessor")
    pixels = model.pixels
    pixels.require("do_resize", True)
    pixels.require("aspect_ratio_setting", "anyres")
    pixels.ignore("do_pad", "do_center_crop")  # tiles have their final size already
    side = pixels.side("crop_size", 224)
    size = pixels.size("size", {"shortest_edge": 224})
    if size not in ({"shortest_edge": side}, {"height": side, "width": side}):
        raise pixels.refused("size", f"the size of tiles, which is {side} in crop_size")
    patch, number = embeddings_of_square(model, side)
    patches = side // patch
    same("the number of a tile's embeddings", {"the tower": number, "patches": patches**2})
    canvases = read_canvases(model, side, _CANVASES)
    token = model.image_token_id(model.token("image_token", model.processor.text("image_token", "<image>")), 32000)

    def layout(width: int, height: int) -> ImageLayout:
        rows, columns = grid_of(width, height, canvases, side, patches)
        total = number + rows * (columns + 1)
        return ImageLayout((token,) * total, (ImagePart(0, total),))

    return ImageLayouts(model.family, token, token, layout)


def read_canvases(model: ModelImages, side: int, default: list[list[int]]) -> list[tuple[int, int]]:
    """Heights and widths in pixels, multiples of a tile's `side`."""
    canvases = model.pixels.pairs("image_grid_pinpoints", default)
    stated = {"the image processor": canvases, "config.json": model.config.pairs("image_grid_pinpoints", default)}
    same("image_grid_pinpoints", {where: str(value) for where, value in stated.items()})
    if any(height % side or width % side or height * width > MAX_TILES * side**2 for height, width in canvases):
        raise model.pixels.refused("image_grid_pinpoints", f"multiples of {side}, of at most {MAX_TILES} tiles each")
    return canvases


def grid_of(width: int, height: int, canvases: Sequence[tuple[int, int]], side: int, patches: int) -> tuple[int, int]:
    """Rows and columns of embeddings on an image's canvas, without the embeddings of its border alone. `side`,
    `patches`: of a tile, in pixels and in embeddings."""
    rows, columns = (length // side * patches for length in _canvas(width, height, canvases))
    if width / height > columns / rows:
        rows -= (rows - _scaled(height, columns / width)) // 2 * 2
    else:
        columns -= (columns - _scaled(width, rows / height)) // 2 * 2
    return rows, columns


def _scaled(length: int, factor: float) -> int:
    return int(round(length * factor, 7))


def _canvas(width: int, height: int, canvases: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The height and width on which most of the image's pixels are kept, of equally good ones the smallest."""

    def pixels_on(canvas: tuple[int, int]) -> int:
        scale = min(canvas[1] / width, canvas[0] / height)
        return min(int(width * scale) * int(height * scale), width * height)

    return max(canvases, key=lambda canvas: (pixels_on(canvas), -canvas[0] * canvas[1]))
