"""Folders of models that read images, without weights: config.json, the image processor's files and a tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMAGE_TOKENS = [
    *("<|image_pad|>", "<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<IMG_CONTEXT>", "<img>", "</img>"),
    *("<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    *("<|image>", "<|image|>", "<image|>"),
]
_QWEN = {
    "config": {"image_token_id": "<|image_pad|>", "vision_config": {"patch_size": 4, "spatial_merge_size": 2}},
    "preprocessor": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 16384},
    },
}
_TILES = {
    "config": {
        "image_token_id": "<image>",
        "scale_factor": 2,
        "vision_config": {"patch_size": 4, "image_size": 16},
    },
    "preprocessor": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "do_pad": True,
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 16},
    },
    "processor": {"image_seq_len": 4},
}
_PIXTRAL = {
    "config": {"image_token_index": "[IMG]", "vision_config": {"model_type": "pixtral", "patch_size": 4}},
    "preprocessor": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 96}, "patch_size": 4},
    "processor": {"patch_size": 4, "processor_class": "PixtralProcessor"},
}
FAMILIES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("idefics3", "smolvlm"), _TILES),
    "pixtral": _PIXTRAL | {"config": _PIXTRAL["config"] | {"model_type": "llava"}},
    "mistral3": _PIXTRAL
    | {
        "config": _PIXTRAL["config"] | {"spatial_merge_size": 2},
        "processor": _PIXTRAL["processor"] | {"spatial_merge_size": 2},
    },
    "llava": {
        "config": {
            "image_token_index": "<image>",
            "vision_config": {"model_type": "clip_vision_model", "image_size": 24, "patch_size": 6},
        },
        "preprocessor": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
        },
        "processor": {
            "patch_size": 6,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "processor_class": "LlavaProcessor",
        },
    },
    "llava_next": {
        "config": {
            "image_token_index": "<image>",
            "vision_config": {"model_type": "clip_vision_model", "image_size": 24, "patch_size": 6},
            "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
        },
        "preprocessor": {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
            "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
        },
        "processor": {
            "patch_size": 6,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "processor_class": "LlavaNextProcessor",
        },
    },
    "llava_onevision": {
        "config": {
            "image_token_index": "<image>",
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 24, "patch_size": 6},
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
            "image_grid_pinpoints": [[24, 24], [24, 48], [48, 24], [48, 48], [72, 24], [48, 72]],
        },
        "preprocessor": {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "do_pad": True,
            "size": {"height": 24, "width": 24},
            "image_grid_pinpoints": [[24, 24], [24, 48], [48, 24], [48, 48], [72, 24], [48, 72]],
        },
        "processor": {
            "image_token": "<image>",
            "video_token": "<video>",
            "num_image_tokens": 16,
            "vision_aspect_ratio": "anyres_max_2",
            "vision_feature_select_strategy": "full",
            "processor_class": "LlavaOnevisionProcessor",
        },
    },
    "siglip": {
        "config": {
            "model_type": "llava",
            "image_token_index": "<image>",
            "vision_feature_select_strategy": "full",
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 24, "patch_size": 6},
        },
        "preprocessor": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 24, "width": 24}},
        "processor": {"patch_size": 6, "vision_feature_select_strategy": "full", "processor_class": "LlavaProcessor"},
    },
    "gemma3": {
        "config": {
            "image_token_index": "<image_soft_token>",
            "mm_tokens_per_image": 9,
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 24, "patch_size": 4},
        },
        "preprocessor": {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_pan_and_scan": None,
            "pan_and_scan_max_num_crops": None,
            "size": {"height": 24, "width": 24},
        },
        "processor": {"image_seq_length": 9, "processor_class": "Gemma3Processor"},
    },
    "gemma4": {
        "config": {
            "image_token_id": "<|image|>",
            "vision_config": {"patch_size": 4, "pooling_kernel_size": 2},
            "text_config": {"use_bidirectional_attention": "vision"},
        },
        "preprocessor": {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        "processor": {
            "audio_ms_per_token": 40,
            "audio_seq_length": 750,
            "image_seq_length": 280,
            "feature_extractor": {"feature_size": 128},
            "processor_class": "Gemma4Processor",
        },
    },
    "internvl": {
        "config": {"image_token_id": "<IMG_CONTEXT>", "vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}},
        "preprocessor": {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "size": {"height": 16, "width": 16},
            "min_patches": 1,
            "max_patches": 12,
        },
        "processor": {"image_seq_length": 4},
    },
}
"""The files of a model of each family. Token ids are given as texts."""


def write_image_model(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    """Write the files of `FAMILIES[name]` beside a tokenizer of bytes and `IMAGE_TOKENS`. `changes`: values that are
    added to a file, by its kind."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    newline = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    vocabulary[newline * 2] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[(newline, newline)]))
    # Gemma's tokenizer does not divide runs of newlines.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name != "gemma3")
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(IMAGE_TOKENS)
    backend.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {"config": {}, "tokenizer_config": {}, **FAMILIES[name]}
    files["config"] = {"model_type": name} | files["config"]
    file_names = {"preprocessor": "preprocessor_config", "processor": "processor_config"}
    for kind in files.keys() | changes.keys():
        found = files.get(kind, {}) | changes.get(kind, {})
        for key in ("image_token_id", "image_token_index"):
            if isinstance(found.get(key), str):
                found[key] = backend.token_to_id(found[key])
        (folder / f"{file_names.get(kind, kind)}.json").write_text(json.dumps(found))
    return folder
