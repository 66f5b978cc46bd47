"""A prompt with several images has the tokens of transformers' whole processor: template text, images, tokenizer."""

import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from image_models import write_image_model
from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from pagewire_common.images.families import read_image_layouts

WHOLE: dict[str, tuple[Any, Any, str]] = {
    "gemma3": (Gemma3Processor, Gemma3ImageProcessorPil, "<start_of_image>"),
    "gemma4": (Gemma4Processor, Gemma4ImageProcessorPil, "<|image|>"),
    "idefics3": (Idefics3Processor, Idefics3ImageProcessorPil, "<image>"),
    "internvl": (InternVLProcessor, GotOcr2ImageProcessorPil, "<IMG_CONTEXT>"),
    "llava": (LlavaProcessor, CLIPImageProcessorPil, "<image>"),
    "llava_next": (LlavaNextProcessor, LlavaNextImageProcessorPil, "<image>"),
    "llava_onevision": (LlavaOnevisionProcessor, LlavaOnevisionImageProcessorPil, "<image>"),
    "qwen2_vl": (Qwen2VLProcessor, Qwen2VLImageProcessorPil, "<|image_pad|>"),
    "qwen3_vl": (Qwen3VLProcessor, Qwen2VLImageProcessorPil, "<|image_pad|>"),
}
TOKENS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
_OF_GEMMA4 = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
}
EXTRA_TOKENS = {"gemma3": TOKENS, "gemma4": _OF_GEMMA4, "internvl": TOKENS}


@pytest.mark.parametrize("name", WHOLE)
def test_prompts_are_those_of_whole_processors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, (kind, image_kind, mark) = write_image_model(tmp_path, name), WHOLE[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        extra_special_tokens=EXTRA_TOKENS.get(name, {}),
        pad_token="[IMG]",  # which Gemma 4's processor asks for
    )
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*processor_config.json")}
    stated = {key: value for key, value in files.get("processor_config.json", {}).items() if key != "processor_class"}
    # Video processors need torchvision, and are not used here.
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    has_none = name in ("gemma3", "idefics3", "llava", "llava_next")
    videos = {} if has_none else {"video_processor": SimpleNamespace(valid_kwargs=None)}
    images = image_kind(**files["preprocessor_config.json"])
    if name == "gemma4":
        stated["feature_extractor"] = SimpleNamespace(valid_kwargs=None)
    processor = kind(image_processor=images, tokenizer=tokenizer, **videos, **stated)
    layouts, numbers = read_image_layouts(folder), random.Random(1)
    assert layouts is not None
    for _ in range(8):
        sizes = [(numbers.randint(4, 150), numbers.randint(4, 150)) for _ in range(numbers.randint(1, 3))]
        around = [numbers.choice(["", "\n", "\n\n", " and\n"]) for _ in range(2)]
        text = "".join(f"Image {number}:{around[0]}{mark}{around[1]}" for number in range(len(sizes)))
        loaded = [Image.new("RGB", size, (9, 99, 199)) for size in sizes]
        nested = [loaded] if name in ("gemma3", "idefics3", "llava_onevision") else loaded
        expected = processor(images=nested, text=[text])["input_ids"][0]
        found = array("I")
        remaining = iter(sizes)
        for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]:
            new: Sequence[int] = [token_id]
            if token_id == layouts.placeholder_id:
                new = layouts.among(len(sizes), *next(remaining)).token_ids
            found += layouts.join_newlines(found, array("I", new))
        assert list(found) == list(expected)
