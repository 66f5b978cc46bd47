"""Families whose config.json describes a network for images and texts, and whose text network is a family of its own:
the text's part stands for the whole."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from worker_service.models.config.config_keys import HARMLESS, architectures, refuse
from worker_service.read_keys import ReadKeys
from worker_service.wording import shown


class _Whole(NamedTuple):
    """A family of networks for images and texts."""

    network: str
    """The network's class, without "ForConditionalGeneration"."""
    text: str
    """The text network's family, by default or always."""
    keys: frozenset[str]
    """Keys of the part for images."""
    takes_others: bool = False
    """Whether the text network may be of another family."""
    ties: bool = False
    """Whether embeddings and output head are tied if config.json does not say it."""
    decides_ties: bool = False
    """Whether only the whole's `tie_word_embeddings` counts, because transformers writes its default into
    text_config."""
    pads: bool = False
    """Whether the text network reads padding in place of tokens for images and sounds."""


_OF_QWEN = frozenset({"image_token_id", "video_token_id", "vision_config", "vision_end_token_id",
                      "vision_start_token_id", "vision_token_id"})  # fmt: skip
_OF_LLAVA = frozenset({"image_seq_length", "image_token_id", "image_token_index", "multimodal_projector_bias",
                       "projector_hidden_act", "vision_config", "vision_feature_layer",
                       "vision_feature_select_strategy"})  # fmt: skip
_OF_ONEVISION = frozenset({"image_grid_pinpoints", "video_token_id", "video_token_index", "vision_aspect_ratio"})
_OF_IDEFICS = frozenset({"_pad_token_id", "image_token_id", "scale_factor", "vision_config"})
_OF_LLAMA4 = frozenset({"boi_token_index", "eoi_token_index", "image_token_index", "vision_config"})
_OF_GEMMA4 = frozenset({"audio_config", "audio_ms_per_token", "audio_soft_tokens_per_image", "audio_token_id",
                        "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id",
                        "image_token_id", "video_token_id", "vision_config", "vision_soft_tokens_per_image",
                        "vision_soft_tokens_per_video_frame"})  # fmt: skip
_OF_GEMMA3N = frozenset({"audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id",
                         "boi_token_id", "eoa_token_id", "eoi_token_id", "image_token_id", "vision_config",
                         "vision_soft_tokens_per_image"})  # fmt: skip
_OF_KIMI = frozenset({"ignore_index", "image_token_id", "media_placeholder_token_id", "projection_hidden_size",
                      "projection_layer_norm_eps", "use_unified_vision_chunk", "video_placeholder", "video_token_id",
                      "vision_config", "vision_end_token_id", "vision_start_token_id"})  # fmt: skip
_OF_AUDIO = frozenset({"audio_config", "audio_token_id", "audio_token_index", "ignore_index"})
_OF_VOXTRAL = frozenset({"audio_config", "audio_token_id", "projector_hidden_act"})
_FAMILIES = {
    "gemma3": _Whole("Gemma3", "gemma3_text", _OF_LLAMA4 | {"mm_tokens_per_image"}, ties=True),
    "gemma3n": _Whole("Gemma3n", "gemma3n_text", _OF_GEMMA3N, ties=True),
    "gemma4": _Whole("Gemma4", "gemma4_text", _OF_GEMMA4, ties=True, pads=True),
    "gemma4_unified": _Whole("Gemma4Unified", "gemma4_unified_text", _OF_GEMMA4, ties=True, pads=True),
    "idefics3": _Whole("Idefics3", "llama", _OF_IDEFICS, takes_others=True),
    "internvl": _Whole("InternVL", "qwen2", _OF_LLAVA | {"downsample_ratio"}, takes_others=True, ties=True),
    "kimi_k25": _Whole("Kimi_K25", "deepseek_v3", _OF_KIMI, takes_others=True, ties=True),
    "llama4": _Whole("Llama4", "llama4_text", _OF_LLAMA4),
    "llava": _Whole("Llava", "llama", _OF_LLAVA, takes_others=True),
    "llava_next": _Whole("LlavaNext", "llama", _OF_LLAVA | {"image_grid_pinpoints"}, takes_others=True),
    "llava_onevision": _Whole("LlavaOnevision", "qwen2", _OF_LLAVA | _OF_ONEVISION, takes_others=True),
    "mistral3": _Whole("Mistral3", "mistral", _OF_LLAVA | {"spatial_merge_size"}, takes_others=True, ties=True),
    "qwen2_5_vl": _Whole("Qwen2_5_VL", "qwen2_5_vl_text", _OF_QWEN),
    "qwen2_audio": _Whole("Qwen2Audio", "qwen2", _OF_AUDIO),
    "qwen2_vl": _Whole("Qwen2VL", "qwen2_vl_text", _OF_QWEN),
    "qwen3_5": _Whole("Qwen3_5", "qwen3_5_text", _OF_QWEN),
    "qwen3_5_moe": _Whole("Qwen3_5Moe", "qwen3_5_moe_text", _OF_QWEN),
    "qwen3_vl": _Whole("Qwen3VL", "qwen3_vl_text", _OF_QWEN),
    "qwen3_vl_moe": _Whole("Qwen3VLMoe", "qwen3_vl_moe_text", _OF_QWEN, decides_ties=True),
    "smolvlm": _Whole("SmolVLM", "llama", _OF_IDEFICS, takes_others=True),
    "voxtral": _Whole("Voxtral", "llama", _OF_VOXTRAL, takes_others=True),
}
WHOLES = frozenset(_FAMILIES)
"""Families whose text network runs alone."""
BORROWED = ("gemma3n_text",)
"""Text networks of wholes that run in transformers' code. The others are native."""
_REPEATED_BY_IDEFICS: Mapping[str, object] = {"qk_layer_norms": False, "use_resampler": False}
"""Keys of text_config that are not the text network's, with the only value allowed."""
_UNUSED_BY_IDEFICS = ("neftune_noise_alpha", "perceiver_config")
"""Keys of text_config for training, and for a resampler that no network of these families has."""
_TIED_BY_TEXT = ("llava", "llava_onevision")
"""Families whose embeddings and output head are tied if the network's or the text network's part says it."""
_FLAT = ("qwen2_5_vl", "qwen2_vl")
"""Families whose older files have the text network's keys beside those of the images."""
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gemma3_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 131_072, "num_attention_heads": 8,
        "num_hidden_layers": 26, "vocab_size": 262_208,
    },
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11_008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 32_000,
    },
    "qwen2": {
        "hidden_size": 4096, "intermediate_size": 22_016, "max_position_embeddings": 32_768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 151_936,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14_336, "max_position_embeddings": 131_072,
        "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32_000,
    },
    "voxtral": {
        "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131_072,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e8,
        "vocab_size": 131_072,
    },
    "ministral3": {
        "hidden_size": 4096, "intermediate_size": 14_336, "max_position_embeddings": 262_144,
        "num_attention_heads": 32, "num_hidden_layers": 34, "vocab_size": 131_072,
    },
    "mistral4": {
        "hidden_size": 4096, "intermediate_size": 12_288, "max_position_embeddings": 1_048_576,
        "num_attention_heads": 32, "num_hidden_layers": 36, "vocab_size": 131_072,
    },
}  # fmt: skip
"""Values that published files leave out, because they are transformers' defaults: of a family of text networks, or of
a family of wholes, whatever its text network is."""
TENSORS_OF_IMAGES = (
    r"^(model\.)?(audio_tower|connector|embed_(audio|vision)|image_newline|mm_projector|multi_modal_projector"
    r"|vision_(embedder|model|tower)|visual)(\.|$)",
)
"""Patterns for names of tensors of the part for images."""


def has_images(json: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a network for images or sounds, and texts, whose text network runs alone."""
    return text_part(json) is not json


def text_part(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text network; any other config.json itself. Raises ValueError."""
    family, text = json.get("model_type"), json.get("text_config")
    if family not in _FAMILIES:
        return json
    whole = _FAMILIES[family]
    network = f"{whole.network}ForConditionalGeneration".replace("_", "")  # Kimi's files spell it without
    if any(name.replace("_", "") != network for name in architectures(json)):
        return json
    if text is None and family in _FLAT:
        text = {name: value for name, value in json.items() if name not in {"architectures", "model_type", *whole.keys}}
        json = {name: value for name, value in json.items() if name not in text}
    if text is None and whole.text in BORROWED:
        text = {}  # transformers' defaults
    if not isinstance(text, Mapping):
        return json
    shared = {name: json[name] for name in ("tie_word_embeddings",) if name in json}
    known = {"architectures", "model_type", "text_config", *whole.keys, *shared, *HARMLESS}
    repeated = {name: text.get(name) for name in ("hidden_size", "vocab_size")}
    neutral = {**repeated, "is_encoder_decoder": False, "language_model_only": False}
    neutral["use_image_newline_parameter"] = True  # always so
    known |= {name for name, value in neutral.items() if json.get(name) == value}
    refuse({name: value for name, value in json.items() if name not in known}, family)
    text_family = text.get("model_type", whole.text)
    if not isinstance(text_family, str):
        raise ValueError(f"text_config.model_type is {shown(text_family)}; it must be the name of a family")
    if text_family != whole.text and not whole.takes_others:
        if family not in _FLAT or text_family != family:
            raise ValueError(f"text_config describes a model {text_family}, not {whole.text}")
        text_family = whole.text
    whole_counts = whole.takes_others or whole.decides_ties
    for name, value in shared.items() if not whole_counts else ():
        if text.get(name, value) != value:
            raise ValueError(f"{name} is {value} for the network, and {text[name]} in text_config")
    is_tied = family in _TIED_BY_TEXT and text.get("tie_word_embeddings") is True
    if is_tied or ((whole.ties or whole.decides_ties) and not shared):
        shared = {"tie_word_embeddings": is_tied or whole.ties}
    text = {name: value for name, value in text.items() if name != "architectures"}  # the family counts
    if whole.keys is _OF_IDEFICS:
        unused = {name: text[name] for name in _UNUSED_BY_IDEFICS if name in text}
        neutral = {**_REPEATED_BY_IDEFICS, **unused, "pixel_shuffle_factor": json.get("scale_factor", 2)}
        text = {name: value for name, value in text.items() if name not in neutral or value != neutral[name]}
    defaults = {**_DEFAULTS.get(text_family, {}), **_DEFAULTS.get(family, {})}
    if isinstance(ropes := text.get("rope_parameters") or text.get("rope_scaling"), Mapping) and "rope_theta" in ropes:
        defaults.pop("rope_theta", None)
    text = {**defaults, **text, **shared, "model_type": text_family}
    return {name: _without_mrope(value) if name in _ROPES else value for name, value in text.items()}


def padded_tokens(json: Mapping[str, Any]) -> tuple[frozenset[int], int]:
    """The tokens for images and sounds in whose place a whole network's text network reads padding, and the padding's
    token. Raises ValueError."""
    if not _FAMILIES[json["model_type"]].pads:
        return frozenset(), 0
    keys = ReadKeys(json)
    found = (
        keys.integer(f"{kind}_token_id", number, null=-1, least=0)
        for kind, number in (("audio", 258_881), ("image", 258_880), ("video", 258_884))
    )
    text = ReadKeys(json["text_config"], "text_config.")
    return frozenset(found) - {-1}, text.integer("pad_token_id", 0, least=0, most=text.integer("vocab_size") - 1)


_ROPES = ("rope_parameters", "rope_scaling")


def _without_mrope(parameters: object) -> object:
    """Qwen2-VL's first files name the type of rotary embeddings "mrope", which is the default type with sections."""
    if not isinstance(parameters, Mapping):
        return parameters
    return {
        name: "default" if name in ("rope_type", "type") and value == "mrope" else value
        for name, value in parameters.items()
    }
