"""Writes a model folder of SmolVLM 256M's shape for random weights, and draws images.

The text network has the default model's tokenizer. An image of 512 pixels is one tile, of 64 tokens.
"""

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from worker_service.loading.model_store import find_model

SIDE = 512
_IMAGE, _AROUND, _WHOLE, _END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}:{% if message.content is string %}"
    " {{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def write_image_model(folder: Path) -> None:
    """Write config.json, the tokenizer and the processor's files, without weights."""
    folder.mkdir()
    source = find_model("default", Path("~/.cache/pagewire").expanduser()).path
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    special = [_AROUND, _IMAGE, _WHOLE, _END, *_TILES]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, "bos_token": "<|im_start|>",
        "eos_token": _END, "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "model_max_length": 8192,
        "additional_special_tokens": [_AROUND, _IMAGE, _END],
    }  # fmt: skip
    end = tokenizer.token_to_id(_END)
    text = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49280, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": end, "pad_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    vision = {
        "model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": SIDE, "patch_size": 16,
    }  # fmt: skip
    config = {
        "model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"], "scale_factor": 4,
        "image_token_id": tokenizer.token_to_id(_IMAGE), "tie_word_embeddings": False, "dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": end, "pad_token_id": 2, "text_config": text, "vision_config": vision,
    }  # fmt: skip
    pixels = {
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor",
        "size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": True,
        "do_convert_rgb": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_pad": True,
        "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
    }  # fmt: skip
    files = {
        "config.json": config, "tokenizer_config.json": of_tokenizer, "preprocessor_config.json": pixels,
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 64},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def draw(seed: int) -> Image.Image:
    """An image of SIDE pixels a side that no other seed draws."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((SIDE, SIDE))


def data_url(seed: int) -> str:
    file = io.BytesIO()
    draw(seed).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
