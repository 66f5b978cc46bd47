"""LLaVA with a CLIP or SigLIP tower: the same number of image tokens for every image, which is resized and cropped to a
square."""

from typing import NamedTuple

from pagewire_common.images.head import MAX_PIXELS
from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from pagewire_common.images.model_images import ModelImages, same
from pagewire_common.images.of_family.pixtral import pixtral_layouts

_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Additional embeddings of each type of tower: CLIP has one for the class, besides one for each patch."""
_SIDES = {"LlavaImageProcessor": 224, "CLIPImageProcessor": 224, "SiglipImageProcessor": 224}


class SquareSizes(NamedTuple):
    """`side`: of the square that every image becomes. `shortest_edge`: of an image before it is cropped; 0 if all
    images are resized to the same size. `pads`: whether an image first gets a border that makes it a square."""

    side: int
    shortest_edge: int = 0
    pads: bool = False

    def check(self, width: int, height: int) -> None:
        """Refuse an image of which the image processor would make far more pixels. Raises ValueError."""
        longer, shorter = max(width, height), min(width, height)
        number = longer**2 if self.pads else self.shortest_edge**2 * longer // shorter
        if number > MAX_PIXELS:
            raise ValueError(
                f"has {width} x {height} pixels, of which the model's image processor would make {number}; at most "
                f"{MAX_PIXELS} are allowed"
            )


def llava_layouts(model: ModelImages) -> ImageLayouts:
    tower = model.vision.text("model_type", "clip_vision_model")
    if tower == "pixtral":
        return pixtral_layouts(model, image_token_id=32000)
    if tower not in _TOWERS:
        raise model.vision.refused("model_type", f"{', '.join(_TOWERS)} or pixtral")
    model.processor.require("processor_class", "LlavaProcessor")
    sizes = _sizes(model)
    _, number = embeddings_of_square(model, sizes.side)
    text = model.token("image_token", model.processor.text("image_token", "<image>"))
    token = model.image_token_id(text, 32000)
    layout = ImageLayout((token,) * number, (ImagePart(0, number),))

    def layout_of(width: int, height: int) -> ImageLayout:
        sizes.check(width, height)
        return layout

    return ImageLayouts(model.family, token, token, layout_of)


def embeddings_of_square(model: ModelImages, side: int) -> tuple[int, int]:
    """The sides of a patch, and the number of embeddings of a square of pixels, whose sides are `side`."""
    tower = model.vision.text("model_type", "clip_vision_model")
    if tower not in _TOWERS:
        raise model.vision.refused("model_type", " or ".join(_TOWERS))
    same("the size of images", {"the image processor": side, "vision_config": model.vision.side("image_size", 224)})
    # Default patch sizes: 32 for CLIP, 16 for SigLIP.
    patch = model.vision.side("patch_size", 32 if _TOWERS[tower] else 16)
    same("patch_size", {"vision_config": patch, "processor_config.json": model.processor.side("patch_size", patch)})
    additional = model.processor.integer("num_additional_image_tokens", 0, least=0)
    same("the number of additional image tokens", {"the tower": _TOWERS[tower], "processor_config.json": additional})
    strategies = ("default", "full")
    strategy = model.config.text("vision_feature_select_strategy", "default")
    stated = model.processor.text("vision_feature_select_strategy", strategy)
    same("vision_feature_select_strategy", {"config.json": strategy, "processor_config.json": stated})
    model.config.require("vision_feature_select_strategy", *strategies)
    return patch, (side // patch) ** 2 + additional - (strategy == "default")


def _sizes(model: ModelImages) -> SquareSizes:
    kind = model.image_processor(*_SIDES)
    is_cropping, pixels = kind != "SiglipImageProcessor", model.pixels
    pixels.require("do_resize", True)
    if kind != "LlavaImageProcessor":
        pixels.require("do_pad", False)
    pads = pixels.flag("do_pad", False)
    pixels.ignore("pad_size")
    default = {"shortest_edge": _SIDES[kind]} if is_cropping else {"height": _SIDES[kind], "width": _SIDES[kind]}
    size = pixels.size("size", default)
    cropped = pixels.side("crop_size", _SIDES[kind])
    if pixels.flag("do_center_crop", is_cropping):
        if size.keys() not in ({"shortest_edge"}, {"height", "width"}):
            raise pixels.refused("size", "an object of shortest_edge, or of height and width")
        return SquareSizes(cropped, size.get("shortest_edge", 0), pads)
    if size.keys() != {"height", "width"} or size["height"] != size["width"]:
        raise pixels.refused("size", "an object of height and width, which are equal")
    return SquareSizes(size["height"], pads=pads)
