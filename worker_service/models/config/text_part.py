"""Families whose config.json describes a network for pictures and texts, and whose text network is a family of its own:
the text's part stands for the whole."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config.config_keys import HARMLESS, architectures, refuse

_FAMILIES = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration"),
}
"""The text network's family, and the class of the whole network, by family."""
_OF_PICTURES = {"image_token_id", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id"}


def text_part(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text network; any other config.json itself. Raises ValueError."""
    family = json.get("model_type")
    text = json.get("text_config")
    if family not in _FAMILIES or not isinstance(text, Mapping):
        return json
    text_family, whole = _FAMILIES[family]
    if set(architectures(json)) - {whole}:
        return json
    shared = {name: json[name] for name in ("tie_word_embeddings",) if name in json}
    known = {"architectures", "model_type", "text_config", *_OF_PICTURES, *shared, *HARMLESS}
    refuse({name: value for name, value in json.items() if name not in known}, family)
    if text.get("model_type", text_family) != text_family:
        raise ValueError(f"text_config describes a model {text['model_type']}, not {text_family}")
    for name, value in shared.items():
        if text.get(name, value) != value:
            raise ValueError(f"{name} is {value} for the network, and {text[name]} in text_config")
    return {**text, **shared, "model_type": text_family}
