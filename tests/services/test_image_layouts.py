"""The tokens of an image are those that transformers' processor writes for it, for every size."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from image_models import FAMILIES, write_image_model
from transformers.image_processing_backends import PilBackend
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pagewire_common.images.families import read_image_layouts
from pagewire_common.images.layout import ImageLayout, ImageLayouts

# The function that this module imports of the variant for torchvision is the same in both.
with mock.patch.dict(
    sys.modules, {"transformers.models.pixtral.image_processing_pixtral": image_processing_pil_pixtral}
):
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

Expected = Callable[[int, int], tuple[str, int]]
"""The text that transformers' processor writes in place of the placeholder of an image, and the number of tiles."""
SIDES = st.one_of(st.integers(1, 100), st.integers(1, 4000))


def without_pixels(self: object, image: np.ndarray, size: Any, *_: object, **__: object) -> np.ndarray:  # type: ignore[type-arg]
    if not size.height or not size.width:
        raise ValueError("height and width must be > 0")  # as Pillow says
    return np.broadcast_to(np.uint8(0), (3, size.height, size.width))


def processed(processor: Any, width: int, height: int, **options: Any) -> Any:
    """The real processor's answer for an image of which there is only the shape."""
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    with mock.patch.object(PilBackend, "resize", without_pixels):
        return processor(image, do_rescale=False, do_normalize=False, input_data_format="channels_first", **options)


def expected_of(name: str, folder: Path) -> Expected:
    files = {
        kind: json.loads((folder / f"{kind}_config.json").read_text())
        for kind in ("preprocessor", "processor")
        if (folder / f"{kind}_config.json").exists()
    }
    images, stated = files["preprocessor"], files.get("processor", {})
    if name.startswith("qwen"):
        qwen = Qwen2VLImageProcessorPil(**images)

        def text(width: int, height: int) -> tuple[str, int]:
            patches = qwen.get_number_of_image_patches(height, width)
            stub = SimpleNamespace(image_processor=qwen, image_token="<|image_pad|>")
            return Qwen2VLProcessor.replace_image_token(stub, {"image_grid_thw": np.array([[1, 1, patches]])}, 0), 1
    elif name in ("idefics3", "smolvlm"):
        idefics = Idefics3ImageProcessorPil(**images)
        stub = SimpleNamespace(
            fake_image_token="<fake_token_around_image>",
            image_token="<image>",
            global_image_tag="<global-img>",
            **stated,
        )

        def text(width: int, height: int) -> tuple[str, int]:
            found = processed(idefics, width, height, do_pad=False, return_row_col_info=True)
            return Idefics3Processor.replace_image_token(stub, found, 0), len(found["pixel_values"][0])
    elif name in ("pixtral", "mistral3"):
        pixtral = image_processing_pil_pixtral.PixtralImageProcessorPil(**images)
        stub = SimpleNamespace(
            image_token="[IMG]",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
            **{"spatial_merge_size": 1} | stated,
        )

        def text(width: int, height: int) -> tuple[str, int]:
            found = processed(
                pixtral, width, height, do_pad=False, patch_size=stub.patch_size * stub.spatial_merge_size
            )
            return PixtralProcessor.replace_image_token(stub, found, 0), 1
    elif name == "gemma3":
        (number,) = (value for value in stated.values() if isinstance(value, int))

        def text(*_: int) -> tuple[str, int]:
            return f"\n\n<start_of_image>{'<image_soft_token>' * number}<end_of_image>\n\n", 1
    elif name == "gemma4":
        patch, pooled = images["patch_size"], images["pooling_kernel_size"]
        stub = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")

        def text(width: int, height: int) -> tuple[str, int]:
            most = images["max_soft_tokens"] * pooled**2
            rows, columns = (
                side // patch for side in get_aspect_ratio_preserving_size(height, width, patch, most, pooled)
            )
            found = {"num_soft_tokens_per_image": [rows * columns // pooled**2]}
            return Gemma4Processor.replace_image_token(stub, found, 0), 1
    elif name == "llava_next":
        stub = SimpleNamespace(image_processor=SimpleNamespace(**images), image_token="<image>", **stated)
        stub._get_unpadded_features = partial(LlavaNextProcessor._get_unpadded_features, stub)
        stub._get_number_of_features = partial(LlavaNextProcessor._get_number_of_features, stub)
        side = images["crop_size"]["height"]

        def text(width: int, height: int) -> tuple[str, int]:
            found = {"image_sizes": [(height, width)], "pixel_values": [[np.zeros((3, side, side))]]}
            return LlavaNextProcessor.replace_image_token(stub, found, 0), 1
    elif name == "llava_onevision":
        stub = SimpleNamespace(image_processor=SimpleNamespace(**images), **stated)
        for method in ("_get_unpadded_features", "_get_number_of_features"):
            setattr(stub, method, partial(getattr(LlavaOnevisionProcessor, method), stub))
        side = images["size"]["height"]

        def text(width: int, height: int) -> tuple[str, int]:
            found = {"image_sizes": [(height, width)], "pixel_values": [[np.zeros((3, side, side))]]}
            return LlavaOnevisionProcessor.replace_image_token(stub, found | {"batch_num_images": [1]}, 0), 1
    elif name == "internvl":
        tiles = GotOcr2ImageProcessorPil(**images)
        stub = SimpleNamespace(
            start_image_token="<img>", image_token="<IMG_CONTEXT>", end_image_token="</img>", **stated
        )

        def text(width: int, height: int) -> tuple[str, int]:
            found = processed(tiles, width, height, **InternVLProcessor.images_kwargs)
            return InternVLProcessor.replace_image_token(stub, found, 0), len(found["pixel_values"])
    else:
        processors = {
            one.__name__: one for one in (CLIPImageProcessorPil, LlavaImageProcessorPil, SiglipImageProcessorPil)
        }
        square = processors[images["image_processor_type"] + "Pil"](**images)
        stub = SimpleNamespace(image_token="<image>", **{"num_additional_image_tokens": 0} | stated)

        def text(width: int, height: int) -> tuple[str, int]:
            found = square(np.zeros((3, height, width), dtype=np.uint8), input_data_format="channels_first")
            return LlavaProcessor.replace_image_token(stub, found, 0), 1

    return text


def tiles(longest: int, side: int) -> dict[str, dict[str, Any]]:
    """Changes of an Idefics model: tiles of one image token."""
    return {
        "config": {"vision_config": {"patch_size": side // 2}},
        "preprocessor": {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}},
        "processor": {"image_seq_len": 1},
    }


MODELS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "tiles of an odd size": ("idefics3", tiles(75, 15)),
    "tiles that do not divide the longest edge": ("idefics3", tiles(70, 15)),
    "more than 4096 pixels, and tiles without a token of their place": ("smolvlm", tiles(5000, 500)),
    "images in one tile": ("idefics3", {"preprocessor": {"do_image_splitting": False}}),
    "3 to 7 tiles": ("internvl", {"preprocessor": {"min_patches": 3, "max_patches": 7}}),
    "images without tiles": ("internvl", {"preprocessor": {"max_patches": 1}}),
    "limits of pixels by their older names": ("qwen2_vl", {"preprocessor": {"min_pixels": 500, "max_pixels": 900}}),
    "images in a rectangle": ("mistral3", {"preprocessor": {"size": {"height": 50, "width": 90}}}),
    "the embedding of a class": (
        "llava",
        {
            "config": {"vision_feature_select_strategy": "full"},
            "processor": {"vision_feature_select_strategy": "full"},
        },
    ),
    "a square with a border": (
        "llava",
        {"preprocessor": {"image_processor_type": "LlavaImageProcessor", "do_pad": True}},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name, changes = MODELS[request.param]
    return name, write_image_model(tmp_path_factory.mktemp("images"), name, **changes)


def check(layouts: ImageLayouts, layout: ImageLayout) -> None:
    """The properties of every layout: parts in order, which begin and end with an image token and contain all."""
    image = layouts.image_token_id
    places = [place for place, token_id in enumerate(layout.token_ids) if token_id == image]
    assert [part for part in layout.parts if part.stop <= part.start] == []
    within = [place for part in layout.parts for place in range(*part) if layout.token_ids[place] == image]
    assert within == places
    assert all(layout.token_ids[part.start] == layout.token_ids[part.stop - 1] == image for part in layout.parts)
    if layout.grid is not None:
        rows, columns = layout.grid
        assert rows * columns == len(places)


def test_layouts_are_those_of_transformers_for_every_size(model: tuple[str, Path]) -> None:
    name, folder = model
    layouts, expected = read_image_layouts(folder), expected_of(name, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert layouts is not None

    @settings(max_examples=40, deadline=None)
    @given(width=SIDES, height=SIDES)
    @example(width=1, height=1)
    @example(width=16, height=16)
    @example(width=17, height=16)
    @example(width=64, height=63)
    @example(width=150, height=91)
    def of_any_size(width: int, height: int) -> None:
        if name in ("llava", "siglip"):
            width, height = 1 + width % 50, 1 + height % 50
        try:
            layout = layouts.of(width, height)
        except ValueError as error:
            assert f"has {width} x {height} pixels" in str(error)  # noqa: PT017
            with pytest.raises(ValueError):  # noqa: PT011  # in transformers' words
                expected(width, height)
            return
        check(layouts, layout)
        text, num_tiles = expected(width, height)
        assert list(layout.token_ids) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(layout.parts) == num_tiles

    of_any_size()


def test_published_sizes_give_published_counts(tmp_path: Path) -> None:
    """With the values of Qwen2.5-VL's, SmolVLM's and Mistral Small's files."""
    qwen = {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    folder = write_image_model(
        tmp_path / "qwen", "qwen2_5_vl", preprocessor=qwen, config={"vision_config": {"patch_size": 14}}
    )
    layouts = read_image_layouts(folder)
    assert layouts is not None
    assert layouts.of(1024, 768).grid == (27, 37)
    edges = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    config = {"vision_config": {"patch_size": 16, "image_size": 512}, "scale_factor": 4}
    folder = write_image_model(
        tmp_path / "smol", "smolvlm", preprocessor=edges, config=config, processor={"image_seq_len": 64}
    )
    layouts = read_image_layouts(folder)
    assert layouts is not None
    layout = layouts.of(1024, 768)
    assert [part.stop - part.start for part in layout.parts] == [64] * 13


def without(name: str, folder: Path, **changes: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the sentence is compared
        read_image_layouts(write_image_model(folder, name, **changes))
    return str(caught.value)


REFUSED: list[tuple[str, dict[str, dict[str, Any]], str]] = [
    ("qwen2_vl", {"preprocessor": {"crops": 3}}, "preprocessor_config.json has the unknown key 'crops'"),
    (
        "qwen2_vl",
        {"preprocessor": {"do_resize": False}},
        "do_resize in preprocessor_config.json is False; it must be True",
    ),
    (
        "qwen2_vl",
        {"preprocessor": {"patch_size": 14}},
        "patch_size is 14 in the image processor and 4 in vision_config",
    ),
    ("qwen2_vl", {"preprocessor": {"merge_size": 3}}, "merge_size is 3 in the image processor and 2 in vision_config"),
    (
        "qwen2_vl",
        {"preprocessor": {"size": {"longest_edge": 9}}},
        "it must be an object of shortest_edge and longest_edge",
    ),
    ("qwen2_vl", {"preprocessor": {"size": 224}}, "size in preprocessor_config.json is 224; it must be an object"),
    ("qwen2_vl", {"preprocessor": {"patch_size": 1 << 40}}, "must be a whole number from 1 to"),
    ("qwen2_vl", {"preprocessor": {"image_processor_type": "ViTImageProcessor"}}, "it must be Qwen2VLImageProcessor"),
    ("qwen2_vl", {"config": {"image_token_id": 3}}, "config.json says [3] for the image token"),
    ("qwen2_vl", {"tokenizer_config": {"image_token": "<none>"}}, "the tokenizer has no token '<none>'"),
    ("llava", {"processor": {"num_additional_image_tokens": 0}}, "1 in the tower and 0 in processor_config.json"),
    ("llava", {"preprocessor": {"crop_size": 30}}, "the size of images is 30 in the image processor and 24"),
    ("llava", {"preprocessor": {"do_center_crop": False}}, "it must be an object of height and width, which are equal"),
    ("llava", {"processor": {"vision_feature_select_strategy": "full"}}, "the values must be equal"),
    ("llava", {"processor": {"image_tokens": 3}}, "processor_config.json has the unknown key 'image_tokens'"),
    ("idefics3", {"processor": {"image_seq_len": 5}}, "5 in processor_config.json and 4 in config.json"),
    ("smolvlm", {"processor": {"processor_class": "Idefics3Processor"}}, "it must be 'SmolVLMProcessor'"),
    ("internvl", {"preprocessor": {"max_patches": 1000}}, "it must be from min_patches to 256"),
    ("internvl", {"config": {"downsample_ratio": 0.25}}, "downsample_ratio in config.json is 0.25; it must be 0.5"),
    ("mistral3", {"processor": {"spatial_merge_size": 1}}, "1 in processor_config.json and 2 in config.json"),
    ("mistral3", {"processor": {"image_break_token": "[BREAK]"}}, "the tokenizer has no token '[BREAK]'"),
    (
        "qwen2_vl",
        {"config": {"model_type": "paligemma"}},
        "'paligemma' are not read: all tokens of its prompts attend to each other",
    ),
    ("llava_next", {"preprocessor": {"image_grid_pinpoints": [[24, 48]]}}, "[(24, 48)] in the image processor and"),
    ("llava_next", {"preprocessor": {"image_grid_pinpoints": [24, 48]}}, "it must be a list of pairs"),
    ("llava_next", {"preprocessor": {"size": {"shortest_edge": 30}}}, "the size of tiles, which is 24 in crop_size"),
    ("llava_next", {"processor": {"num_additional_image_tokens": 0}}, "1 in the tower and 0 in processor_config.json"),
    ("llava_onevision", {"processor": {"num_image_tokens": 17}}, "17 in processor_config.json and 16 in the tower"),
    (
        "llava_onevision",
        {"config": {"vision_aspect_ratio": "anyres"}, "processor": {"vision_aspect_ratio": "anyres"}},
        "vision_aspect_ratio in config.json is 'anyres'; it must be a text such as anyres_max_9",
    ),
    ("llava_onevision", {"config": {"vision_feature_select_strategy": "default"}}, "is 'default'; it must be 'full'"),
    ("llava_onevision", {"preprocessor": {"crop_size": 20}}, "the size of tiles is 24 in size and 20 in crop_size"),
    (
        "gemma4",
        {"config": {"vision_config": {"model_type": "siglip_vision_model", "patch_size": 4, "pooling_kernel_size": 2}}},
        "is 'siglip_vision_model'; it must be 'gemma4_vision'",
    ),
    ("gemma4", {"preprocessor": {"max_soft_tokens": 71}}, "is 71; it must be 280 or 70 or 140 or 560 or 1120"),
    ("gemma4", {"preprocessor": {"pooling_kernel_size": 1}}, "is 1; it must be a whole number from 2"),
    ("gemma4", {"preprocessor": {"pooling_kernel_size": 3}}, "3 in the image processor and 2 in vision_config"),
    (
        "gemma4",
        {"config": {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 139}}},
        "max_soft_tokens in preprocessor_config.json is 70; it must be at most 69, for 139 positions of patches",
    ),
    ("gemma3", {"preprocessor": {"do_pan_and_scan": True}}, "do_pan_and_scan in preprocessor_config.json is True"),
    ("gemma3", {"preprocessor": {"size": {"height": 28, "width": 28}}}, "must be the height and width of 24 pixels"),
    ("gemma3", {"processor": {"image_seq_length": 16}}, "16 in processor_config.json and 9 in config.json"),
    ("qwen2_vl", {"config": {"model_type": "new_vl"}}, "'new_vl' are not read: no layout of its images is known"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_a_setting_that_is_not_obeyed_is_refused_by_name(
    name: str, changes: dict[str, dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    assert reason in without(name, tmp_path, **changes)


def test_a_model_without_a_vision_tower_has_no_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_image_layouts(tmp_path) is None


def test_nested_settings_of_an_image_processor_come_first(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path, "qwen2_vl")
    nested = json.loads((folder / "preprocessor_config.json").read_text()) | {"min_pixels": 1024}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    layouts = read_image_layouts(folder)
    assert layouts is not None
    assert layouts.of(1, 1).grid == (4, 4)


def test_strips_that_no_processor_reads_are_refused(tmp_path: Path) -> None:
    for name, reason in (("qwen3_vl", "may be at most 200 times the shorter"), ("mistral3", "less than one row")):
        layouts = read_image_layouts(write_image_model(tmp_path / name, name))
        assert layouts is not None
        with pytest.raises(ValueError, match=reason):
            layouts.of(60_000, 1)


def test_an_image_of_which_the_processor_would_make_far_more_pixels_is_refused(tmp_path: Path) -> None:
    """A resize of the shorter side, or a border, would need gigabytes of memory for a file of a few hundred bytes."""
    bordered = {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    for kind, changes, longest in (("llava", {}, 58_254), ("bordered", bordered, 5_792)):
        layouts = read_image_layouts(write_image_model(tmp_path / kind, "llava", preprocessor=changes))
        assert layouts is not None
        for width, height in ((longest, 1), (1, longest)):
            assert layouts.of(width, height).token_ids
            with pytest.raises(ValueError, match=r"would make 3355\d+; at most 33554432 are allowed"):
                layouts.of(width + (width > 1), height + (height > 1))
    layouts = read_image_layouts(write_image_model(tmp_path / "beside", "llava_onevision"))
    assert layouts is not None
    assert layouts.among(1, 5793, 10).token_ids
    with pytest.raises(ValueError, match="would make 33558849"):
        layouts.among(2, 5793, 10)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 40)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "full", "<image>"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["height", "width", "a"]), inner),
    max_leaves=4,
)


def test_files_of_any_content_are_read_or_refused_in_a_sentence(model: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = model
    files = {file.name: file for file in folder.iterdir()}
    kinds = [kind for kind in ("config.json", "preprocessor_config.json", "processor_config.json") if kind in files]
    values = {kind: json.loads(files[kind].read_text()) for kind in kinds}
    keys = [(kind, key) for kind in kinds for key in values[kind] if key != "model_type"]
    keys += [("config.json", "vision_config." + key) for key in values["config.json"]["vision_config"]]

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(keys), JSON), min_size=1, max_size=2))
    def of_any_content(changes: list[tuple[tuple[str, str], Any]]) -> None:
        changed = json.loads(json.dumps(values))
        for (kind, key), value in changes:
            place = changed[kind]
            if key.startswith("vision_config."):
                place, key = place["vision_config"], key.removeprefix("vision_config.")
            if isinstance(place, dict):
                place[key] = value
        for kind, found in changed.items():
            (tmp_path / kind).write_text(json.dumps(found))
        try:
            layouts = read_image_layouts(files | {kind: tmp_path / kind for kind in kinds})
        except ValueError as error:
            assert str(error)  # noqa: PT017
            return
        assert layouts is not None
        for width, height in ((1, 1), (30, 20), (20, 300)):
            with suppress(ValueError):
                check(layouts, layouts.of(width, height))

    of_any_content()
