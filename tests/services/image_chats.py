"""A tokenizer with a token for images, chat templates that write it, and a model whose images have a simple layout."""

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image as Picture
from tiny_model import write_byte_tokenizer
from transformers import PreTrainedTokenizerFast

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.images.layout import ImageLayout, ImageLayouts, ImagePart
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.tokenization import Tokenizer

MARK = "<image>"
END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = (
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% elif c['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
)
HEAD = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
TAIL = "<|im_end|>\n{% endfor %}" + END
TEMPLATES = {
    "lists": HEAD + LOOP + TAIL,
    "both": HEAD + "{% if m['content'] is string %}{{ m['content'] }}{% else %}" + LOOP + "{% endif %}" + TAIL,
    "texts": HEAD + "{{ m['content'] }}" + TAIL,
    "images first": HEAD
    + "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    + "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}"
    + TAIL,
}
"""Templates by the contents that they read. SmolVLM's reads lists, and Qwen2-VL's both."""
WIDE, TALL = (4, 2), (1, 3)


def layout_of_fake_model(width: int, height: int) -> ImageLayout:
    """One token for each pixel, in two parts if the image is wide, and a byte token between and around the parts."""
    if width > 8:
        raise ValueError(f"has {width} pixels in a row, and this model reads 8")
    size, number = (width * height // 2, 2) if width > height else (width * height, 1)
    token_ids, parts = [70], list[ImagePart]()
    for _ in range(number):
        parts.append(ImagePart(len(token_ids), len(token_ids) + size))
        token_ids += [*[259] * size, 71]
    return ImageLayout(tuple(token_ids), tuple(parts))


FAKE_LAYOUTS = ImageLayouts("fake", 259, 259, layout_of_fake_model)


def image_of(width: int, height: int, form: str = "PNG", shade: int = 7) -> bytes:
    file = io.BytesIO()
    Picture.new("RGB", (width, height), (shade, 100, 200)).save(file, form)
    return file.getvalue()


def write_image_tokenizer(directory: Path, template: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer with the special token <image>, whose id is 259."""
    plain = directory.parent / "plain"
    if not plain.exists():
        write_byte_tokenizer(plain)
    shutil.copytree(plain, directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer


def fake_image_model(model: ServedModel, directory: Path) -> ServedModel:
    return replace(
        model,
        tokenizer=Tokenizer(directory),
        vocabulary_size=260,
        context_length=400,
        pool_tokens=800,
        images=FAKE_LAYOUTS,
        encoder_cache_size=64,
    )


def chat_of(*messages: tuple[str, Any], **settings: Any) -> pb.Chat:
    """Each message: its role, and a text or a list of texts and image files."""
    chat = pb.Chat(**settings)
    for role, content in messages:
        added = chat.messages.add(role=role, content=content if isinstance(content, str) else "")
        for part in () if isinstance(content, str) else content:
            added.parts.add(**({"text": part} if isinstance(part, str) else {"image": pb.Image(data=part)}))
    return chat
