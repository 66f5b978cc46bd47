"""Reads the part of a config.json that describes how a network encodes images, which runs in transformers' code."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoModel

from worker_service.models.config.text_part import text_part
from worker_service.models.config.transformers_json import parse
from worker_service.models.config.transformers_keys import check_known
from worker_service.read_keys import ReadKeys
from worker_service.wording import shown

TILED = {"idefics3": 1, "internvl": 0, "smolvlm": 1}
"""Families that encode each tile of an image on its own, with the dimension of tiles in the network's inputs."""
_FROM_SAVED_CLIP = {"projection_dim", "vocab_size"}
"""Keys of LLaVA's vision_config without effect on it: of the outputs and of the texts of CLIP."""
_READ_SEVERAL_LAYERS = ("llava", "llava_next", "llava_onevision")
"""Families whose `vision_feature_layer` may be a list."""


@dataclass(frozen=True)
class ImageConfig:
    network: Any
    """transformers' configuration object, with a text network without layers."""
    network_class: Any
    num_deep: int
    """Layers of the decoder after which image embeddings are added to hidden states."""
    own_tensors: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> "ImageConfig":
        """json: a config.json with images, see `has_images`. Raises ValueError if the network is not supported."""
        text = text_part(json)
        # Older files have the text network's keys beside the others.
        whole = {name: value for name, value in json.items() if "text_config" in json or name not in text}
        network = parse({**whole, "model_type": json["model_type"], "text_config": {**text}})
        network_class = AutoModel._model_mapping[type(network)]
        vision = network.vision_config
        if not isinstance(vision.model_type, str):
            raise ValueError(f"vision_config.model_type is {shown(vision.model_type)}; it must be a text")
        keys = ReadKeys(json.get("vision_config") or {})
        if vision.model_type == "clip_vision_model":
            keys.without_effect(*_FROM_SAVED_CLIP)
        keys.neutral(
            in_chans=getattr(vision, "in_channels", None), spatial_patch_size=getattr(vision, "patch_size", None),
            tie_word_embeddings=False, use_base_siglip=False,
        )  # fmt: skip
        if network.model_type in TILED:  # the image processor's
            keys.without_effect("max_image_size", "size")
        if vision.model_type == "gemma4_vision":
            keys.neutral(global_head_dim=vision.head_dim)
            keys.without_effect("default_output_length")  # the image processor's
        unread = {**keys.unread(), "model_type": vision.model_type}
        check_known(unread, vision, AutoModel._model_mapping.get(type(vision), network_class))
        _check_feature_layers(network)
        _check_heads(vision)
        num_deep, num_layers = (
            len(getattr(vision, "deepstack_visual_indexes", ())),
            network.text_config.num_hidden_layers,
        )
        if num_deep > num_layers:
            raise ValueError(f"deepstack_visual_indexes has {num_deep} layers, and the decoder {num_layers}")
        return cls(_without_text(network), network_class, num_deep)


def _check_feature_layers(network: Any) -> None:
    """Refuse layers of the vision network that transformers accepts, though it then fails at every image."""
    layers = getattr(network, "vision_feature_layer", None)
    if layers is None:
        return
    last, takes_list = network.vision_config.num_hidden_layers, network.model_type in _READ_SEVERAL_LAYERS
    listed = layers if takes_list and isinstance(layers, list | tuple) else [layers]
    if not listed or layers == 0 or any(layer not in range(-last - 1, last + 1) for layer in listed):
        wanted = f"a number from {-last - 1} to {last} except 0" + (", or a list, which may contain 0" * takes_list)
        raise ValueError(f"vision_feature_layer is {shown(layers)}; it must be {wanted}")


def _check_heads(vision: Any) -> None:
    """Refuse numbers of heads that transformers accepts, though it then fails at every image."""
    for name in ("num_heads", "num_attention_heads"):
        heads = getattr(vision, name, 1)
        if heads < 1:
            raise ValueError(f"vision_config.{name} is {shown(heads)}; it must be a whole number from 1 on")
    if hasattr(vision, "num_heads"):  # of Qwen's networks
        width = getattr(vision, "embed_dim", vision.hidden_size)
        if width % vision.num_heads:
            raise ValueError(
                f"vision_config.num_heads is {vision.num_heads}; it must divide the width, which is {width}"
            )


def _without_text(network: Any) -> Any:
    """A copy with a small text network, of which nothing is used, and without a network for sounds."""
    network = copy.deepcopy(network)
    if hasattr(network, "audio_config"):
        network.audio_config = None
    text = network.text_config
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    return network
