"""A tiny LLaVA of byte tokens that is trained, in seconds, to say which colour the circle in an image has."""

import io
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw
from tiny_model import write_byte_tokenizer, write_marked_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

COLOURS = {"r": (230, 20, 20), "g": (20, 190, 20), "b": (30, 40, 230), "y": (240, 230, 20)}
QUESTION = "?"
SIZE, PATCH = 32, 16
NUM_PATCHES = (SIZE // PATCH) ** 2
IMAGE_TOKEN = "<image>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
STEPS, BATCH = 80, 16
HELD_OUT = 1_000_000
"""Seeds from here on are for images on which the model is not trained."""


def draw(seed: int) -> tuple[Image.Image, str]:
    """A grey image with a circle somewhere, and the letter of its colour."""
    chance = random.Random(seed)
    colour = chance.choice(list(COLOURS))
    image = Image.new("RGB", (SIZE, SIZE), (chance.randrange(60, 200),) * 3)
    radius = chance.randrange(4, 10)
    x, y = chance.randrange(radius, SIZE - radius), chance.randrange(radius, SIZE - radius)
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), COLOURS[colour])
    return image, colour


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_seer(directory: Path) -> Path:
    """Train with one thread, and write a folder in float32 as those of published models."""
    import torch
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    write_byte_tokenizer(directory / "bytes")
    folder = directory / "tiny-seer"
    tokenizer = write_marked_tokenizer(folder, directory / "bytes", [IMAGE_TOKEN], TEMPLATE)
    image_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    text = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        image_size=SIZE, patch_size=PATCH, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, projection_dim=64,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image_id, image_seq_length=NUM_PATCHES,
        vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Llava(config)
    prompt = tokenizer(f"<|im_start|>{IMAGE_TOKEN * NUM_PATCHES}{QUESTION}<|im_end|><|im_start|>").input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for step in range(STEPS):
        drawn = [draw(step * BATCH + number) for number in range(BATCH)]
        ids = torch.tensor([[*prompt, *tokenizer(f"{letter}<|im_end|>").input_ids] for _, letter in drawn])
        labels = torch.where(torch.arange(ids.shape[1]) < len(prompt), -100, ids)
        loss = model(input_ids=ids, pixel_values=pixels([image for image, _ in drawn]), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    model.save_pretrained(folder)
    sizes = {"height": SIZE, "width": SIZE}
    half = [0.5] * 3
    CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size=sizes, image_mean=half, image_std=half
    ).save_pretrained(folder)
    processor = {
        "image_token": IMAGE_TOKEN, "num_additional_image_tokens": 1, "patch_size": PATCH,
        "processor_class": "LlavaProcessor", "vision_feature_select_strategy": "default",
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def pixels(images: list[Image.Image]) -> "Tensor":
    """[number, 3, SIZE, SIZE] float32, as the image processor computes it."""
    import numpy as np
    import torch

    values = np.stack([np.asarray(image) for image in images]).astype(np.float32) / 255
    return torch.from_numpy((values - 0.5) / 0.5).permute(0, 3, 1, 2).contiguous()
