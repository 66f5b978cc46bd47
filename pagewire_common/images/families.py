"""Finds out how a model reads images, from the files in its folder."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from pagewire_common.images.layout import ImageLayouts
from pagewire_common.images.model_images import Encode, ModelImages
from pagewire_common.images.of_family.gemma import gemma3_layouts
from pagewire_common.images.of_family.gemma4 import gemma4_layouts
from pagewire_common.images.of_family.idefics import idefics_layouts
from pagewire_common.images.of_family.internvl import internvl_layouts
from pagewire_common.images.of_family.llava import llava_layouts
from pagewire_common.images.of_family.llava_next import llava_next_layouts
from pagewire_common.images.of_family.llava_onevision import llava_onevision_layouts
from pagewire_common.images.of_family.pixtral import pixtral_layouts
from pagewire_common.images.of_family.qwen import qwen_layouts
from pagewire_common.images.settings import IMAGES_WITHOUT_EFFECT, PIXELS, Settings
from pagewire_common.model_files.json_text import loads
from pagewire_common.model_files.shown import shown
from pagewire_common.model_files.tokenizer_config import TokenizerConfig

FILES = ("preprocessor_config.json", "processor_config.json")
"""The files of a model's folder that are read besides config.json and the tokenizer's."""

_FAMILIES: Mapping[str, Callable[[ModelImages], ImageLayouts]] = {
    "gemma3": gemma3_layouts,
    "gemma4": gemma4_layouts,
    "idefics3": idefics_layouts,
    "internvl": internvl_layouts,
    "llava": llava_layouts,
    "llava_next": llava_next_layouts,
    "llava_onevision": llava_onevision_layouts,
    "mistral3": partial(pixtral_layouts, image_token_id=10),
    "qwen2_vl": partial(qwen_layouts, patch_size=14, image_token_id=151655),
    "qwen2_5_vl": partial(qwen_layouts, patch_size=14, image_token_id=151655),
    "qwen3_vl": partial(qwen_layouts, patch_size=16, image_token_id=151655),
    "qwen3_vl_moe": partial(qwen_layouts, patch_size=16, image_token_id=151655),
    "qwen3_5": partial(qwen_layouts, patch_size=16, image_token_id=248056),
    "qwen3_5_moe": partial(qwen_layouts, patch_size=16, image_token_id=248056),
    "smolvlm": idefics_layouts,
}
_REFUSED = {
    "gemma3n": "its network for images needs the library timm, which pagewire does not use",
    "paligemma": "all tokens of its prompts attend to each other in both directions",
    "mllama": "its decoder attends to images in layers of their own",
}
"""Families whose images are not read, with the reason."""


def read_image_layouts(files: Path | Mapping[str, Path], encode: Encode | None = None) -> ImageLayouts | None:
    """`files`: the model's folder, or its files by name. `encode`: the model's tokenizer, by default tokenizer.json.

    Returns None for a model without images. Raises ValueError with the reason if the model's images are not read, and
    StartError for a tokenizer_config.json that is refused.
    """
    if isinstance(files, Path):
        files = {file.name: file for file in files.iterdir()}
    config = read_file(files, "config.json")
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        if not config.get("vision_config"):
            return None
        reason = _REFUSED.get(family, "no layout of its images is known")
        raise ValueError(f"images of models of type {shown(family)} are not read: {reason}")
    processor = read_file(files, "processor_config.json")
    where, pixels = read_preprocessor(files, processor, "image_processor", "images")
    processor = {"processor_class": pixels.get("processor_class"), **processor}
    settings = Settings("config.json", config)
    model = ModelImages(
        family,
        config=settings,
        vision=settings.group("vision_config"),
        processor=Settings("processor_config.json", processor, IMAGES_WITHOUT_EFFECT),
        pixels=Settings(where, pixels, (*PIXELS, *IMAGES_WITHOUT_EFFECT)),
        tokenizer=TokenizerConfig.read(files),
        encode=encode or tokenizer_of(files),
    )
    layouts = _FAMILIES[family](model)
    model.processor.ignore("chat_template", "tokenizer", "video_processor")  # have files of their own, or for videos
    model.processor.finish()
    model.pixels.finish()
    return layouts


def tokenizer_of(files: Mapping[str, Path]) -> Encode:
    @cache
    def tokenizer() -> tokenizers.Tokenizer:
        if "tokenizer.json" not in files:
            raise ValueError("there is no tokenizer.json, so images are not read")
        loaded = tokenizers.Tokenizer.from_file(str(files["tokenizer.json"]))
        loaded.no_truncation()
        loaded.no_padding()
        return loaded

    return lambda text: tokenizer().encode(text, add_special_tokens=False).ids


def read_file(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found = loads(files[name].read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not a JSON object")
    return found


def read_preprocessor(
    files: Mapping[str, Path], processor: dict[str, Any], part: str, kind: str
) -> tuple[str, dict[str, Any]]:
    """The settings of a processor of images or sounds, and where they stand. They are removed from `processor`, the
    content of processor_config.json, if they are its `part`. Raises ValueError."""
    where, values = f"{part} of processor_config.json", processor.pop(part, None)
    if values is None:
        where, values = "preprocessor_config.json", read_file(files, "preprocessor_config.json")
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{where} is missing or empty, so {kind} are not read")
    return where, values
