"""Tiny random models of the families that read images, with their processors' files, and their oracle: transformers."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from pagewire_common.images.families import read_image_layouts
from pagewire_common.images.layout import ImageLayouts

VOCABULARY = 264
WORDS = 100
"""The token ids of words; special tokens come after them."""
SPECIAL = [
    "<image>", "<fake_token_around_image>", "<global-img>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>",
    "<|video_pad|>", "<img>", "</img>", "<IMG_CONTEXT>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|image>", "<|image|>", "<image|>",
]  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_QWEN_TEXT = {name: value for name, value in _TEXT.items() if name != "head_dim"}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN3_VL = {
    "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_MISTRAL4 = {
    "model_type": "mistral4", **_TEXT, "num_key_value_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "q_lora_rank": 12, "kv_lora_rank": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_SIDES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_PIXTRAL = {"model_type": "pixtral", **_SIDES, "head_dim": 12, "patch_size": 4, "image_size": 48}
_QWEN_VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 64 * 30},
}  # fmt: skip
_CLIP_PIXELS = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}  # fmt: skip
_CANVASES = [[28, 56], [56, 28], [56, 56]]
_IDEFICS = {
    "vision_config": _SIDES, "scale_factor": 2, "text_config": {"model_type": "llama", **_TEXT},
}  # fmt: skip


class Family(NamedTuple):
    config: Mapping[str, Any]
    image_token: str
    pixels: Mapping[str, Any]
    processor: Mapping[str, Any]


def _idefics(name: str) -> Family:
    pixels = {
        "image_processor_type": f"{name}ImageProcessor", "size": {"longest_edge": 84},
        "max_image_size": {"longest_edge": 28},
    }  # fmt: skip
    return Family(_IDEFICS, "<image>", pixels, {"processor_class": f"{name}Processor", "image_seq_len": 4})


def _gemma4(text: Mapping[str, Any]) -> Family:
    vision = {**_SIDES, "num_key_value_heads": 2, "head_dim": 12, "patch_size": 3, "pooling_kernel_size": 2,
              "position_embedding_size": 140, "standardize": True, "use_clipped_linears": True}  # fmt: skip
    vision.pop("image_size")
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "pad_token_id": 4,
              "global_head_dim": 32, "sliding_window": 5}  # fmt: skip
    pixels = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 3, "pooling_kernel_size": 2,
              "max_soft_tokens": 70}  # fmt: skip
    return Family(
        {"vision_config": vision, "text_config": {**_TEXT, **layers, **text}, "audio_token_id": 98,
         "video_token_id": 99},
        "<|image|>", pixels, {"processor_class": "Gemma4Processor"},
    )  # fmt: skip


def _pixtral(config: Mapping[str, Any], merge: int) -> Family:
    pixels = {
        "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 48},
        "patch_size": {"height": 4, "width": 4},
    }  # fmt: skip
    processor = {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": merge}
    return Family({"vision_config": _PIXTRAL, "text_config": {"model_type": "mistral", **_TEXT}, **config}, "[IMG]",
                  pixels, processor)  # fmt: skip


def _qwen(vision: Mapping[str, Any], text: Mapping[str, Any], processor: str = "Qwen2_5_VL") -> Family:
    return Family(
        {"vision_config": {**_QWEN_VISION, **vision}, "text_config": text}, "<|image_pad|>", _QWEN_PIXELS,
        {"processor_class": f"{processor}Processor"},
    )  # fmt: skip


FAMILIES: Mapping[str, Family] = {
    "gemma3": Family(
        {"vision_config": {"model_type": "siglip_vision_model", **_SIDES, "image_size": 24, "patch_size": 3},
         "mm_tokens_per_image": 16,
         "text_config": {**_TEXT, "query_pre_attn_scalar": 16, "sliding_window": 5,
                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}},
        "<image_soft_token>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}},
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
    ),
    "gemma4": _gemma4({"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}),
    "gemma4 of embeddings for layers": _gemma4(
        {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 1}
    ),
    "idefics3": _idefics("Idefics3"),
    "internvl": Family(
        {"vision_config": {**_SIDES, "image_size": [28, 28], "patch_size": [7, 7]}, "image_seq_length": 4,
         "text_config": {"model_type": "qwen2", **_QWEN_TEXT}},
        "<IMG_CONTEXT>",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}, "max_patches": 6},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "llava": Family(
        {"vision_config": {"model_type": "clip_vision_model", **_SIDES},
         "text_config": {"model_type": "llama", **_TEXT}, "image_seq_length": 16},
        "<image>", _CLIP_PIXELS,
        {"processor_class": "LlavaProcessor", "patch_size": 7, "num_additional_image_tokens": 1,
         "vision_feature_select_strategy": "default"},
    ),
    "llava_next": Family(
        {"vision_config": {"model_type": "clip_vision_model", **_SIDES},
         "text_config": {"model_type": "llama", **_TEXT}, "image_grid_pinpoints": _CANVASES},
        "<image>",
        _CLIP_PIXELS | {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": _CANVASES},
        {"processor_class": "LlavaNextProcessor", "patch_size": 7, "num_additional_image_tokens": 1,
         "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": Family(
        {"vision_config": {"model_type": "siglip_vision_model", **_SIDES, "vision_use_head": False},
         "text_config": {"model_type": "qwen2", **_QWEN_TEXT}, "image_grid_pinpoints": _CANVASES,
         "vision_aspect_ratio": "anyres_max_2"},
        "<image>",
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 28, "width": 28},
         "image_grid_pinpoints": _CANVASES},
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2",
         "vision_feature_select_strategy": "full"},
    ),
    "llava of siglip": Family(
        {"vision_config": {"model_type": "siglip_vision_model", **_SIDES, "vision_use_head": False},
         "text_config": {"model_type": "qwen3", **_TEXT}, "image_seq_length": 16,
         "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        "<image>",
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}},
        {"processor_class": "LlavaProcessor", "patch_size": 7, "vision_feature_select_strategy": "full"},
    ),
    "llava of pixtral": _pixtral({"vision_feature_select_strategy": "full", "vision_feature_layer": -1}, 1),
    "mistral3": _pixtral({"vision_feature_layer": -1, "spatial_merge_size": 2}, 2),
    "mistral3 of mistral 4": _pixtral(
        {"vision_feature_layer": -1, "spatial_merge_size": 2, "text_config": _MISTRAL4}, 2
    ),
    "qwen2_vl": _qwen(
        {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}, _QWEN_TEXT | {"rope_parameters": _SECTIONS}, "Qwen2VL"
    ),
    "qwen2_5_vl": _qwen(
        {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 16,
         "fullatt_block_indexes": [1]},
        _QWEN_TEXT | {"rope_parameters": _SECTIONS},
    ),
    "qwen3_vl": _qwen(_QWEN3_VL, _TEXT | {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}, "Qwen3VL"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe as transformers saves it"), _qwen(
        _QWEN3_VL,
        _TEXT | _EXPERTS | {"mlp_only_layers": [1], "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
        "Qwen3VL",
    )),
    "qwen3_5": _qwen(
        {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 16},
        _TEXT | _DELTA | {"head_dim": 32, "rope_parameters": {
            **_SECTIONS, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}},
        "Qwen3VL",
    ),
    "qwen3_5_moe": _qwen(
        {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 16},
        _TEXT | _DELTA | _EXPERTS | {"head_dim": 32, "shared_expert_intermediate_size": 20, "rope_parameters": {
            **_SECTIONS, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}},
        "Qwen3VL",
    ),
    "smolvlm": _idefics("SmolVLM"),
}  # fmt: skip


def make_model(path: Path, name: str) -> Path:
    """Write a model's folder."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    family, ids = FAMILIES[name], {token: WORDS + number for number, token in enumerate(SPECIAL)}
    token_key = "image_token_index" if name.startswith(("gemma3", "llava", "mistral3")) else "image_token_id"
    config = AutoConfig.for_model(
        name.partition(" ")[0], **{token_key: ids[family.image_token]}, **json.loads(json.dumps(family.config))
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter_name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and not parameter_name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.15)
    for buffer_name, buffer in model.named_buffers():
        if name.startswith("gemma4") and buffer_name.endswith(("layer_scalar", "std_scale", "std_bias")):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.2)
    model.save_pretrained(path)
    if name == "gemma3":  # published files have these names
        weights = load_file(path / "model.safetensors")
        named = {key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in weights.items()}
        save_file(named, path / "model.safetensors", {"format": "pt"})
    if name == "qwen3_vl_moe":  # published files have experts' inputs before their outputs
        weights = load_file(path / "model.safetensors")
        turned = {key: value.mT.contiguous() if ".experts." in key else value for key, value in weights.items()}
        save_file(turned, path / "model.safetensors", {"format": "pt"})
    words = {"\n": 2, "\n\n": 3} | {f"t{number}": number for number in range(WORDS) if number not in (2, 3)}
    tokenizer = Tokenizer(WordLevel(words, "t0"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "preprocessor_config.json").write_text(json.dumps(family.pixels))
    (path / "processor_config.json").write_text(json.dumps(family.processor))
    return path


class Picture(NamedTuple):
    """An image file and its size."""

    data: bytes
    width: int
    height: int


def picture(width: int, height: int, seed: int = 0) -> Picture:
    pixels = np.random.default_rng(seed + 1000 * width + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture(file.getvalue(), width, height)


Prompt = Sequence[int | Picture]
"""Token ids and images."""


def expand(prompt: Prompt, layouts: ImageLayouts) -> tuple[list[int], list[tuple[int, Picture]]]:
    """The prompt's token ids, and each image with the place of its first token."""
    token_ids: list[int] = []
    pictures: list[tuple[int, Picture]] = []
    number = sum(isinstance(part, Picture) for part in prompt)
    for part in prompt:
        if isinstance(part, int):
            token_ids.append(part)
        else:
            pictures.append((len(token_ids), part))
            token_ids += layouts.among(number, part.width, part.height).token_ids
    return token_ids, pictures


_NOT_INPUTS = ("num_crops", "num_patches", "num_soft_tokens_per_image")
"""Results of image processors that no network reads."""


class ImageOracle:
    """A model in transformers, in float32, without a cache."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        layouts = read_image_layouts(path)
        assert layouts is not None
        self.layouts = layouts
        self._model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self._processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        self._options: dict[str, Any] = {}
        if layouts.family == "internvl":
            self._options = {"crop_to_patches": True}
        if self._model.config.vision_config.model_type == "pixtral":
            side = 4 * getattr(self._model.config, "spatial_merge_size", 1)
            self._options = {"patch_size": {"height": side, "width": side}}

    @torch.inference_mode()
    def embed(self, token_ids: list[int]) -> Tensor:
        """[len(token_ids), hidden_size]."""
        found: Tensor = self._model.get_input_embeddings()(torch.tensor(token_ids))
        return found

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], pictures: Sequence[Picture]) -> Tensor:
        """The log-softmax at every position, [len(token_ids), vocabulary_size]."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([token_ids])}
        if pictures:
            images = [Image.open(io.BytesIO(one.data)).convert("RGB") for one in pictures]
            nested = [images] if self.layouts.beside is not None else images  # as its chats are
            found = self._processor(images=nested, return_tensors="pt", **self._options)
            inputs |= {name: value for name, value in found.items() if name not in _NOT_INPUTS}
        if "image_grid_thw" in inputs:
            is_image = inputs["input_ids"] == self.layouts.image_token_id
            inputs["mm_token_type_ids"] = is_image.int()
        if self.layouts.attends_both_ways:
            name = "mm_token_type_ids" if self.layouts.family == "gemma4" else "token_type_ids"
            inputs[name] = (inputs["input_ids"] == self.layouts.image_token_id).int()
        return self._model(**inputs, use_cache=False).logits[0].float().log_softmax(-1)

    def greedy(self, prompt: Prompt, count: int) -> tuple[list[int], Tensor]:
        """The continuation, and the log-softmax behind the prompt and each of its tokens but the last."""
        token_ids, pictures = expand(prompt, self.layouts)
        known, rows = list(token_ids), []
        for _ in range(count):
            rows.append(self.logprobs(known, [one for _, one in pictures])[-1])
            known.append(int(rows[-1].argmax()))
        return known[len(token_ids) :], torch.stack(rows)
